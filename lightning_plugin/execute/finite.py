"""Search for the first operator of a step that made a non-finite number of finite ones.

[Note: non-finite] Most numbers that are computed from a non-finite one are non-finite too. The device checks small
differentiable results (losses) in its own time; the answer is read when the first gradient reaches the results of the
recording, or when the user asks. If a loss is not finite, the first non-finite one of the recording's small vectors, in
recorded order, tells which part to search. If that vector was computed in tiles, its part runs again as a recording of
its own, under a plan for the rest of the step's budget, and each tile of each operator is checked. Its inputs have not
changed since: running statistics are not read by the operators that update them, random masks are among the vectors or
depend on the step's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Recording, Value, ancestors
from lightning_plugin.ops import Captured, Gather, ReduceOp, Source
from lightning_plugin.residency.transfer import event_after_launched

#: Most elements of a result that is checked after each run.
MAX_ELEMENTS = 4096
#: PyTorch's name of a cast, also of autocast's. Most overflows of float16 happen in casts.
CAST = "_to_copy"

How = Literal["NaN", "infinite"]


def how_non_finite(t: Tensor) -> How | None:
    """Return if a tensor has a NaN, or else an infinite number, without a copy of it; None if it is finite."""
    if t.is_complex():
        t = torch.view_as_real(t.conj() if t.is_conj() else t)
    if not t.is_floating_point() or not t.numel() or t.is_meta:
        return None
    least, most = (float(end) for end in torch.aminmax(t.detach()))
    if least != least or most != most:
        return "NaN"
    return "infinite" if max(-least, most) == float("inf") else None


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that was not finite.

    Attributes:
        how: NaN or infinite.
        what: Description of the result or the image.
        where: The tile.
        before: The first infinite tensor, if the first NaN came later.
    """

    how: How
    what: str
    where: str = ""
    before: NonFinite | None = None

    def __str__(self) -> str:
        found = f"the first {'NaN' if self.how == 'NaN' else 'infinite value'} is in {self.what}{self.where}"
        return found if self.before is None else f"{found}; before it, {self.before}"


@dataclass(eq=False)
class Watch:
    """Observer of a recording that runs again.

    Attributes:
        first: The first operator in recorded order whose result is infinite, and the first whose result has a NaN, with
            its serial number.
    """

    first: dict[How, tuple[int, NonFinite]] = field(default_factory=dict)

    def check(self, node: Node, tile: Tensor, owned: Sequence[Box] = ()) -> None:
        """Check an operator's result on a tile that owns these boxes of its segment's targets."""
        if "NaN" in self.first and node.serial >= self.first["NaN"][0]:
            return
        how = how_non_finite(tile)
        if how is not None and (how not in self.first or node.serial < self.first[how][0]):
            box = next((b for b in owned if not b.empty), None)
            self.first[how] = node.serial, NonFinite(how, describe(node), "" if box is None else f", in the tile {box}")

    def found(self) -> NonFinite | None:
        """Return the first NaN, with the first infinite tensor before it; or else the first infinite tensor."""
        nan, infinite = self.first.get("NaN"), self.first.get("infinite")
        if nan is None or infinite is None:
            one = nan or infinite
            return None if one is None else one[1]
        if infinite[0] > nan[0]:
            return nan[1]
        return replace(nan[1], before=infinite[1])


def describe(node: Node) -> str:
    """Describe the result of a node."""
    if isinstance(node.op, Source):
        return "an image"
    if node.name != CAST:
        return f"the result of {node.label}"
    to = str(node.outputs[0].dtype).removeprefix("torch.")
    where = f" in '{node.path}'" if node.path else ""
    return f"the result of a cast to {to}{where}"


def differentiable_results(values: Iterable[Value], vectors: Mapping[Value, Tensor]) -> list[Tensor]:
    """Return the small results that have a ``grad_fn``."""
    found = (vectors[v] for v in values if v in vectors)
    return [t for t in found if t.grad_fn is not None and t.numel() <= MAX_ELEMENTS]


class FiniteCheck:
    """Check that small results are finite, by a kernel that is not waited for until the answer is read.

    Attributes:
        known: The recording that made the results, and the small vectors of its run, detached: hooks of the results
            refer to this object.
    """

    def __init__(self, results: Sequence[Tensor], recording: Recording, vectors: Mapping[Value, Tensor]) -> None:
        self.known = [(recording, {v: t.detach() for v, t in vectors.items() if t.numel() <= MAX_ELEMENTS})]
        device = results[0].device
        finite = [t.detach().isfinite().all().to(device) for t in results]
        self.finite = torch.stack(finite).all().to("cpu", non_blocking=True)
        self.ready = event_after_launched(device)

    def take_known(self) -> tuple[Recording, dict[Value, Tensor]]:
        """Return the recording and its vectors, and forget them: the results may outlive this check."""
        return self.known.pop()

    def is_non_finite(self) -> bool:
        """Return if one of the results is not finite; waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return not self.finite


def first_vector(nodes: Sequence[Node], vectors: Mapping[Value, Tensor]) -> tuple[Node, Value, How] | None:
    """Return the first vector, in recorded order, that is not finite: its operator, its value, NaN or infinite."""
    for node in nodes:
        for v in node.outputs:
            if not v.is_map and v in vectors and (how := how_non_finite(vectors[v])) is not None:
                return node, v, how
    return None


def find_untiled(nodes: Sequence[Node], node: Node, value: Value, how: How) -> NonFinite | None:
    """Name the operator that made a non-finite vector; None if it was computed in tiles, which have to be searched."""
    if isinstance(node.op, Captured):
        user = next((n.label for n in nodes if value in n.inputs), "the step")
        return NonFinite(how, f"a tensor of shape {value.shape} that {user} uses: it was not finite before the step")
    return None if isinstance(node.op, (ReduceOp, Gather)) else NonFinite(how, describe(node))


def recording_of(
    recording: Recording, value: Value, vectors: Mapping[Value, Tensor]
) -> tuple[Recording, dict[Value, Tensor]]:
    """Return a recording that computes a vector again, and the vectors that it is given."""
    assert value.node is not None
    known = {v: t for v, t in vectors.items() if v not in value.node.outputs}
    return Recording(tuple(ancestors([value], known)), recording.bindings, frozenset(known)), known
