"""The first non-finite number of a step: the operator that made it of finite ones.

[Note: non-finite] Numbers that are computed from a non-finite one are mostly non-finite, too. Whether a small result
that training follows (a loss) is not finite, its device says in its own time, and it is read when the first gradient
comes to the results of the recording, or when the user asks. Then the recording is looked through once: its small
vectors are all there, and the first non-finite one among them, in the order in which they were recorded, tells where to
look. What it is made of in tiles runs once more as a recording of its own, under a plan for what the step has left of
the budget, and each tile of each operator is looked at. In between nothing has changed that it depends on: running
statistics are not read where they are moved, numbers that were drawn are among the vectors, and the others depend on
the step's key.
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

#: Results of no more elements are looked at after each run.
SMALL = 4096
#: PyTorch's name of a cast, that of autocast too: where numbers are too large for float16, mostly here.
CAST = "_to_copy"

How = Literal["NaN", "infinite"]


def how_non_finite(t: Tensor) -> How | None:
    """NaN or infinite, if a tensor is; found without a copy of it."""
    if t.is_complex():
        t = torch.view_as_real(t)
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
        what: The result or the image, in words.
        where: The tile.
        before: The first infinite one, where the first NaN came later.
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
    """Observer of a recording that is run once more: finds the first operator, in the order of recording, whose result
    is infinite, and the first whose result is NaN."""

    first: dict[How, tuple[int, NonFinite]] = field(default_factory=dict)

    def see(self, node: Node, tile: Tensor, owned: Sequence[Box] = ()) -> None:
        """Look at what an operator made of a tile that owns these boxes of its segment's targets."""
        if "NaN" in self.first and node.serial >= self.first["NaN"][0]:
            return
        how = how_non_finite(tile)
        if how is not None and (how not in self.first or node.serial < self.first[how][0]):
            box = next((b for b in owned if not b.empty), None)
            self.first[how] = node.serial, NonFinite(how, named(node), "" if box is None else f", in the tile {box}")

    def found(self) -> NonFinite | None:
        """NaN, and what was infinite before it; or what was infinite."""
        nan, infinite = self.first.get("NaN"), self.first.get("infinite")
        if nan is None or infinite is None:
            one = nan or infinite
            return None if one is None else one[1]
        if infinite[0] > nan[0]:
            return nan[1]
        return replace(nan[1], before=infinite[1])


def named(node: Node) -> str:
    """The result of a node, in words."""
    if isinstance(node.op, Source):
        return "an image"
    if node.name != CAST:
        return f"the result of {node.label}"
    to = str(node.outputs[0].dtype).removeprefix("torch.")
    where = f" in '{node.path}'" if node.path else ""
    return f"the result of a cast to {to}{where}"


def followed(values: Iterable[Value], vectors: Mapping[Value, Tensor]) -> list[Tensor]:
    """The small results that training follows."""
    found = (vectors[v] for v in values if v in vectors)
    return [t for t in found if t.grad_fn is not None and t.numel() <= SMALL]


class Look:
    """A look at small results: their device says whether they are finite, and is not waited for until that is read.

    Attributes:
        known: What made them, and the small vectors of its run, without their graph: this hangs on the results' own.
    """

    def __init__(self, results: Sequence[Tensor], recording: Recording, vectors: Mapping[Value, Tensor]) -> None:
        self.known = [(recording, {v: t.detach() for v, t in vectors.items() if t.numel() <= SMALL})]
        device = results[0].device
        finite = [t.detach().isfinite().all().to(device) for t in results]
        self.finite = torch.stack(finite).all().to("cpu", non_blocking=True)
        self.ready = event_after_launched(device)

    def taken(self) -> tuple[Recording, dict[Value, Tensor]]:
        """Hand over the values that are known, and let go of them here: results may live on."""
        return self.known.pop()

    def non_finite(self) -> bool:
        """True where one of the results is not finite."""
        if self.ready is not None:
            self.ready.synchronize()
        return not self.finite


def first_vector(nodes: Sequence[Node], vectors: Mapping[Value, Tensor]) -> tuple[Node, Value, How] | None:
    """The first of the vectors, as they were recorded, that is not finite, and its operator."""
    for node in nodes:
        for v in node.outputs:
            if not v.is_map and v in vectors and (how := how_non_finite(vectors[v])) is not None:
                return node, v, how
    return None


def at_once(nodes: Sequence[Node], node: Node, value: Value, how: How) -> NonFinite | None:
    """First operator by the vector alone; None where it is made of tiles that have to be looked at."""
    if isinstance(node.op, Captured):
        user = next((n.label for n in nodes if value in n.inputs), "the step")
        return NonFinite(how, f"a tensor of shape {value.shape} that {user} uses: it was not finite before the step")
    return None if isinstance(node.op, (ReduceOp, Gather)) else NonFinite(how, named(node))


def in_tiles(
    recording: Recording, value: Value, vectors: Mapping[Value, Tensor]
) -> tuple[Recording, dict[Value, Tensor]]:
    """Recording that makes a vector once more, and the vectors that are known."""
    assert value.node is not None
    known = {v: t for v, t in vectors.items() if v not in value.node.outputs}
    return Recording(tuple(ancestors([value], known)), recording.bindings, frozenset(known)), known
