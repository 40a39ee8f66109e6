"""The parts of a segment as one `autograd.Function` each; see [Note: parts] in `program.program`.

[Note: leases] A boundary is held by the segments that read it in backward, until their backward is over; with
retain_graph, as long as the graph.

[Note: dropped] A *dropped* boundary is freed when the last segment that reads it has run forward. In backward, the
first segment that needs it recomputes it: the tiles of the segment that made it run once more, without grad and without
their reductions, whose results are known. Dropped inputs of that segment are recomputed first. A recomputed boundary is
freed like a stored one, after the backward of the last segment that reads it.

The depth of a dropped boundary (`SegmentPlan.drop`) decides if it stays after it was recomputed on the way to another
one: it does if it is dropped no deeper than that one and all those between. Otherwise it is dropped again as soon as
the next is recomputed, and recomputed when backward reaches it. So a run of boundaries dropped to depth 1 between two
stored ones costs one more forward of their segments, whatever its length. Runs dropped to depth 2 between those of
depth 1 cost two. One run of each depth is held at a time: checkpointing by divide and conquer, with one level for each
depth.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.constants import TileNumbers
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.backward import Backward
from lightning_plugin.execute.forward import Forward
from lightning_plugin.execute.frame import Frame
from lightning_plugin.execute.room import make_room
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.streams import Saved, Streams
from lightning_plugin.graph import Value
from lightning_plugin.ledger import Ledger
from lightning_plugin.private import (
    Version,
    first_order,
    has_saved_tensor_hooks,
    identity_hook,
    is_scheduled,
    retains_graph,
    version,
    without_autocast,
    without_view,
    write_count,
)
from lightning_plugin.program.findings import Owned
from lightning_plugin.program.scan import scan_programs
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.boundary import Boundary


def run_segment(run: SegmentRun, frame: Frame) -> None:
    """Run a segment forward, and put its results into the frame, with the backward of each of its parts."""
    if run.scans and len(scans := scan_programs(run.program)) > 1:
        for program in scans:
            run_segment(run.of_part(program, frame), frame)
        return
    programs = run.program.parts
    numbers = run.known_constants and run.rehearsal is None
    ends = run.program.cuts(run.plan.forward) if numbers else None
    for i, t in enumerate(run.program.targets):
        if (v := t.stored) is not None:
            numbered = None if ends is None else TileNumbers.empty(ends[i])
            frame.boundaries[v] = Boundary(
                v.space, v.dtype, v.device, run.home, run.ledger, run.plan.half, run.new_constants(v, frame), numbered
            )
    with torch.no_grad(), without_autocast(run.autocast_type):
        results, carried = run_forward(run, run.inputs(frame), frame.boundaries)
    found = dict(zip(run.outputs, results, strict=True))
    count_results(run.ledger, found.values())
    # Tokens on the segment's device: autograd then runs all segments in one thread, in one order.
    found |= {v: torch.zeros((), device=v.device) for v in run.stored}
    for program in programs:
        part = run if program is run.program else run.of_part(program, frame)
        connect_to_autograd(part, frame, found, carried)
    several = sum(v.requires_grad for v in (*run.outputs, *run.stored)) > 1
    for v in run.outputs:
        # Each of several results has a node of its own: else autograd shows its hooks the missing gradients of others.
        frame.vectors[v] = found[v].view_as(found[v]) if several and found[v].requires_grad else found[v]
    for v in run.stored:
        frame.tokens[v] = found[v]


def run_forward(
    run: SegmentRun, inputs: Sequence[Tensor], stored: Mapping[Value, Boundary]
) -> tuple[Sequence[Tensor], Mapping[Owned, dict[int, Tensor]]]:
    """Run forward; return the reduced vectors, and the rows that each tile of a scan was handed."""
    carried: dict[Owned, dict[int, Tensor]] = {}

    def tile_by_tile() -> list[Tensor]:
        forward = Forward(run, inputs, stored)
        results = list(map(without_view, forward.run()))
        carried.update(forward.carried)
        return results

    memory = run.memory([stored[v] for v in (*run.boundaries, *run.stored)])
    if memory is None:
        results: Sequence[Any] = tile_by_tile()
    else:
        given = [*inputs[: len(inputs) - len(run.boundaries)], *memory]
        results, replayed = run.replays.run("forward", given, tile_by_tile, run.ledger)
        if replayed:
            run.step.report_tiles(run.plan.forward.tiles)
    return results, carried


def run_backward(ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Run backward; return the gradients of the inputs."""
    run: SegmentRun = ctx.run
    boundaries: Sequence[Boundary] = ctx.boundaries

    def tile_by_tile() -> tuple[Tensor | None, ...]:
        return Backward(ctx, inputs, grads).run()

    if not run.can_replay or has_saved_tensor_hooks():
        return tile_by_tile()
    for boundary in boundaries:
        boundary.restore_data()
    waiting = [b.cotangent for b in boundaries if not b.cotangent.is_started]
    summed = [c for c in (*(b.cotangent for b in boundaries), *ctx.cotangents) if c.is_started]
    memory = run.memory([*boundaries, *ctx.recalled.values(), *summed])
    if memory is None:
        return tile_by_tile()

    def with_cotangents() -> list[Tensor | None]:
        return [*tile_by_tile(), *(c.on_device if c.is_started else None for c in waiting)]

    given = [*inputs[: len(inputs) - len(boundaries)], *(g for g in grads if g is not None), *ctx.results, *memory]
    key = (
        run.program,
        run.backward_grid,
        ctx.needs_input_grad,
        tuple([g is None for g in grads]),
        tuple([c.is_started for c in ctx.cotangents]),
        tuple([b.cotangent.is_started for b in boundaries]),
        tuple([is_scheduled(f) for f, _ in ctx.next_functions[len(inputs) - len(boundaries) :]]),
    )
    results, replayed = run.replays.run(key, given, with_cotangents, run.ledger)
    if replayed:
        for cotangent, data in zip(waiting, results[len(results) - len(waiting) :], strict=True):
            if data is not None:
                cotangent.take(data)
        for cotangent in ctx.cotangents:
            cotangent.clear()
        run.step.report_tiles(run.backward_grid.tiles)
    return results[: len(results) - len(waiting)]


def count_results(ledger: Ledger | None, results: Iterable[Tensor | None]) -> None:
    """Count the results of a segment whose tiles the ledger may not have watched."""
    if ledger is not None:
        for t in results:
            if t is not None:
                ledger.count(t)


def connect_to_autograd(
    run: SegmentRun, frame: Frame, made: dict[Value, Tensor], carried: Mapping[Owned, dict[int, Tensor]]
) -> None:
    """Give the results and tokens of a part their backward.

    Args:
        run: The part of the segment.
        frame: The frame.
        made: Results and tokens of forward; replaced by those with a backward.
        carried: The rows that each tile of a scan was handed.
    """
    # `Inputs` checks versions in place of PyTorch: it allows some writes that PyTorch refuses, and refuses some that
    # PyTorch does not see. Hooks of streams and of the user stay.
    hooked = frame.streams is not None or has_saved_tensor_hooks()
    hooks = nullcontext() if hooked else torch.autograd.graph.saved_tensors_hooks(identity_hook, identity_hook)
    with torch.enable_grad(), hooks:
        results = SegmentFunction.apply(run, frame, made, carried, *run.inputs(frame))
    made.update(zip((*run.outputs, *run.stored), results, strict=True))
    if run.ledger is not None and results and results[0].grad_fn is not None:
        run.ledger.hook_function(results[0].grad_fn)


class SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: SegmentRun, frame: Frame, made: Mapping[Value, Tensor], carried: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        stored = {v: frame.boundaries[v] for v in run.stored}
        boundaries = {v: frame.boundaries[v] for v in run.boundaries}
        if run.plan.drop:
            recompute = Recompute(run, Inputs.of([t.detach() for t in inputs], frame.streams), stored, boundaries)
            for boundary in stored.values():
                boundary.recompute = recompute
        ctx.carried = carried
        ctx.boundaries = list(boundaries.values())
        ctx.cotangents = [boundary.cotangent for boundary in stored.values()]
        ctx.recalled = {t: stored[t.map] for t in run.recalls}
        results = [made[v] for v in (*run.outputs, *run.stored)]
        # Copies, since the user may write to the results before backward.
        ctx.results = [r.clone() for r in results[: len(run.outputs)]]
        # The user's hooks may return other tensors than they were given, whose versions say nothing.
        users_hooks = frame.streams is None and has_saved_tensor_hooks()
        ctx.versions = None if users_hooks else Inputs.of(inputs, frame.streams).versions
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        dead = [r for r, v in zip(results, [*run.outputs, *run.stored], strict=True) if not v.requires_grad]
        ctx.mark_non_differentiable(*dead)
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if ctx.versions is not None:
            Inputs(inputs, ctx.versions).restore()
        ctx.run.check_images()
        ledger, rehearsal = ctx.run.ledger, ctx.run.rehearsal
        if rehearsal is not None:
            rehearsal.begin_turn((ctx.run.place, "backward"), False)
        # Saved tensors come back as new ones; the leaves themselves are known to autograd's nodes.
        leaves = (f.variable for f, _ in ctx.next_functions if hasattr(f, "variable"))
        make_room(ctx.run, ctx.boundaries, leaves)
        with profiler_range("segment", ctx.run.place, ctx.run.plan.path, "backward"):
            found = run_backward(ctx, inputs, grads)
        if not retains_graph():  # a loss that the user keeps holds this context, and must not hold images
            ctx.run, ctx.boundaries, ctx.recalled, ctx.carried, ctx.results = None, [], {}, {}, []
        count_results(ledger, found)
        return tuple(found)


@dataclass(frozen=True)
class Inputs:
    """Tensors that forward used and backward or a recomputation will use, with their versions.

    Attributes:
        kept: The tensors; in place of a streamed tensor's copy, a reference by which it is fetched again.
        versions: The versions at first use; None for a tensor that has none.
    """

    kept: Sequence[Tensor | Saved]
    versions: Sequence[Version | None]

    @staticmethod
    def of(tensors: Sequence[Tensor], streams: Streams | None) -> Inputs:
        kept = tensors if streams is None else list(map(streams.pack, tensors))
        return Inputs(
            kept, [write_count(t) if isinstance(k, Saved) else version(t) for t, k in zip(tensors, kept, strict=True)]
        )

    def restore(self) -> list[Tensor]:
        """Return the tensors; raise an error if one of them was changed."""
        found = [t if isinstance(t, Tensor) else t.restore() for t in self.kept]
        for t, before in zip(found, self.versions, strict=True):
            if before != version(t) and before != write_count(t):
                raise RecordingError(
                    f"a tensor of shape {tuple(t.shape)} that the forward pass used was changed in place before "
                    "backward (an optimizer step between forward and backward, say). Its old value is needed."
                )
        return found


class Recompute:
    """Recomputes the boundaries that a segment made.

    The boundaries refer to this object, and it refers to them weakly.
    """

    def __init__(
        self, run: SegmentRun, inputs: Inputs, stored: Mapping[Value, Boundary], boundaries: Mapping[Value, Boundary]
    ) -> None:
        self.run = run
        self.depth = run.plan.drop
        self.inputs = inputs
        self.stored = {v: weakref.ref(boundary) for v, boundary in stored.items()}
        self.boundaries = boundaries

    def __call__(self, deepest: int) -> None:
        """Recompute the boundaries that are dropped. Of the inputs that are restored for it, drop those again that are
        dropped deeper than ``deepest``."""
        inputs = self.inputs.restore()
        self.run.check_images()
        alive = {v: boundary for v, ref in self.stored.items() if (boundary := ref()) is not None}
        missing = {v: boundary for v, boundary in alive.items() if boundary.is_dropped}
        run = self.run.narrow([t for t in self.run.program.targets if t.stored in missing])
        restored = [boundary for v in run.boundaries if (boundary := self.boundaries[v]).is_dropped]
        for boundary in restored:
            boundary.restore_data(deepest)
        for boundary in missing.values():
            boundary.allocate()
        with (
            torch.no_grad(),
            without_autocast(run.autocast_type),
            nullcontext() if run.rehearsal is None else run.rehearsal.turn((run.place, "recompute")),
            profiler_range("segment", run.place, run.plan.path, "recompute"),
        ):
            Forward(run, self.run.inputs_of_part(run, inputs), {**self.boundaries, **missing}).run()
        for boundary in restored:
            if boundary.recompute is not None and boundary.recompute.depth > deepest:
                boundary.drop_data()
