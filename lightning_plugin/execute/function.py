"""The parts of a segment as one `autograd.Function` each; see [Note: parts] in `program.program`.

[Note: leases] A boundary is held by those segments that will read it in backward: until their backward is over, or
longer, with retain_graph.

[Note: dropped] A *dropped* boundary lives until the last segment that reads it has run forward. In backward, the first
segment that needs it has it made again: its producer's tiles run once more, without grad and without their reductions,
whose results are known. What the producer read may have been dropped too, and is then made again first. Each then stays
until the last segment in backward that reads it is done, as a stored one does.

How deep a boundary is dropped (`SegmentPlan.drop`) says which of those made again on the way to another one stay: the
ones after which nothing is made, up to and with that other one, that is dropped less deeply. The others are let go once
more, as soon as what follows from them is there, and made again when backward has come back to them. So a run of
boundaries dropped to depth 1 between two stored ones costs one more forward of the segments that made them, whatever
its length; runs dropped to depth 2 between those of depth 1 cost two, and what is held at a time is one run of each
depth: checkpointing by divide and conquer, with as many levels as the plan has depths.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.constants import Numbered
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
    retains_graph,
    version,
    without_view,
    write_count,
)
from lightning_plugin.program.findings import Owned
from lightning_plugin.program.program import parts_of
from lightning_plugin.program.scan import scanned
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.boundary import Boundary


def run_segment(run: SegmentRun, frame: Frame) -> None:
    """Run a segment forward; leaves the results in the frame, with the backward of each of its parts behind them."""
    if run.scans and len(scans := scanned(run.program)) > 1:
        for program in scans:
            run_segment(run.part(program, frame), frame)
        return
    programs = parts_of(run.program)
    ends = run.program.ends(run.plan.forward)
    for t, at in zip(run.program.targets, ends, strict=True):
        if (v := t.stored) is not None:
            numbered = Numbered.empty(at) if run.known and run.rehearsal is None else None
            frame.stored[v] = Boundary(
                v.space, v.dtype, v.device, run.at, run.ledger, run.plan.half, run.constants(v, frame), numbered
            )
    with torch.no_grad(), torch.autocast(run.autocast_type, enabled=False):
        work = Forward(run, run.inputs(frame), frame.stored)
        found = dict(zip(run.outputs, map(without_view, work.run()), strict=True))
    seen(run.ledger, found.values())
    # On the segment's device, so that autograd runs all segments in one thread, in one order.
    found |= {v: torch.zeros((), device=v.device) for v in run.stored}
    for program in programs:
        connect(run if program is run.program else run.part(program, frame), frame, found, work.carried)
    several = sum(v.requires_grad for v in (*run.outputs, *run.stored)) > 1
    for v in run.outputs:
        # With a node of its own: autograd shows hooks on one of several results the missing gradients of others.
        frame.vectors[v] = found[v].view_as(found[v]) if several and found[v].requires_grad else found[v]
    for v in run.stored:
        frame.tokens[v] = found[v]


def seen(ledger: Ledger | None, results: Iterable[Tensor | None]) -> None:
    """Have a ledger count what a segment hands on, where it does not watch its tiles."""
    for t in results if ledger is not None else ():
        if t is not None:
            ledger.see(t)  # type: ignore[union-attr]


def connect(
    run: SegmentRun, frame: Frame, made: dict[Value, Tensor], carried: Mapping[Owned, dict[int, Tensor]]
) -> None:
    """Put a part's backward behind its results and tokens, which the segment's forward has ``made``; ``carried`` are
    the rows that each tile of a scan was handed."""
    # Some writes are allowed that PyTorch refuses, and others refused that it does not see: `Inputs` looks. Hooks of
    # streams stay, and the user's.
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
        stored = {v: frame.stored[v] for v in run.stored}
        boundaries = {v: frame.stored[v] for v in run.boundaries}
        if run.plan.drop:
            recompute = Recompute(run, Inputs.of([t.detach() for t in inputs], frame.streams), stored, boundaries)
            for handle in stored.values():
                handle.recompute = recompute
        ctx.carried = carried
        ctx.handles = list(boundaries.values())
        ctx.cotangents = [handle.cotangent for handle in stored.values()]
        ctx.recalled = {t: stored[t.map] for t in run.recalls}
        results = [made[v] for v in (*run.outputs, *run.stored)]
        # Copies: the user may write to the results, and backward needs them as they were.
        ctx.results = [r.clone() for r in results[: len(run.outputs)]]
        # What the user's hooks save may come back as other tensors: they look after it themselves.
        theirs = frame.streams is None and has_saved_tensor_hooks()
        ctx.versions = None if theirs else Inputs.of(inputs, frame.streams).versions
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
            Inputs(inputs, ctx.versions).tensors()
        ctx.run.check_images()
        ledger, rehearsal = ctx.run.ledger, ctx.run.rehearsal
        if rehearsal is not None:
            rehearsal.enter((ctx.run.place, "backward"), False)
        # Saved tensors come back as new ones: whose gradients are collected, autograd's own nodes know.
        leaves = [f.variable for f, _ in ctx.next_functions if hasattr(f, "variable")]
        make_room(ctx.run, ctx.handles, leaves)
        with profiler_range("segment", ctx.run.place, ctx.run.plan.path, "backward"):
            found = Backward(ctx, inputs, grads).run()
        if not retains_graph():
            ctx.handles, ctx.recalled = [], {}
        seen(ledger, found)
        return found


@dataclass(frozen=True)
class Inputs:
    """Tensors that were used once and will be used again, and what they were; copies of streamed ones by name. A copy
    lies in other memory each time."""

    kept: Sequence[Tensor | Saved]
    versions: Sequence[Version | None]

    @staticmethod
    def of(tensors: Sequence[Tensor], streams: Streams | None) -> Inputs:
        kept = tensors if streams is None else list(map(streams.pack, tensors))
        return Inputs(
            kept, [write_count(t) if isinstance(k, Saved) else version(t) for t, k in zip(tensors, kept, strict=True)]
        )

    def tensors(self) -> list[Tensor]:
        """The tensors; refuses to go on where one of them was changed."""
        found = [t if isinstance(t, Tensor) else t.fetch() for t in self.kept]
        for t, before in zip(found, self.versions, strict=True):
            if before not in (version(t), write_count(t)):
                raise RecordingError(
                    f"a tensor of shape {tuple(t.shape)} that the forward pass used was changed in place before "
                    "backward (an optimizer step between forward and backward, say). Its old value is needed."
                )
        return found


class Recompute:
    """Makes what a segment stored a second time.

    The segment's own handles know of this, so this knows of them weakly.
    """

    def __init__(
        self, run: SegmentRun, inputs: Inputs, stored: Mapping[Value, Boundary], boundaries: Mapping[Value, Boundary]
    ) -> None:
        self.run = run
        self.depth = run.plan.drop
        self.inputs = inputs
        self.stored = {v: weakref.ref(handle) for v, handle in stored.items()}
        self.boundaries = boundaries

    def __call__(self, deepest: int) -> None:
        """Make it; of what has to come back for that, the boundaries that are dropped deeper than ``deepest`` go
        again."""
        inputs = self.inputs.tensors()
        self.run.check_images()
        there = {v: handle for v, ref in self.stored.items() if (handle := ref()) is not None}
        missing = {v: handle for v, handle in there.items() if handle.is_dropped}
        run = self.run.narrowed([t for t in self.run.program.targets if t.stored in missing])
        passing = [handle for v in run.boundaries if (handle := self.boundaries[v]).is_dropped]
        for handle in passing:
            handle.restore_data(deepest)
        for handle in missing.values():
            handle.allocate()
        with (
            torch.no_grad(),
            torch.autocast(run.autocast_type, enabled=False),
            nullcontext() if run.rehearsal is None else run.rehearsal.during((run.place, "recompute")),
            profiler_range("segment", run.place, run.plan.path, "recompute"),
        ):
            Forward(run, self.run.inputs_of(run, inputs), {**self.boundaries, **missing}).run()
        for handle in passing:
            if handle.recompute is not None and handle.recompute.depth > deepest:
                handle.drop_data()
