"""One segment as one `autograd.Function`.

[Note: leases] A boundary is held by those segments that will read it in backward. They hold it as something saved for
backward, so that it goes when autograd lets go of it: after the segment's backward, or never, with retain_graph.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_plugin.execute.again import Again, Inputs
from lightning_plugin.execute.backward import Backward
from lightning_plugin.execute.forward import Forward
from lightning_plugin.execute.segment import SegmentRun, watched
from lightning_plugin.execute.store import Handle


@dataclass(frozen=True, eq=False)
class Lease:
    """Keeps boundaries while autograd keeps this."""

    handles: tuple[Handle, ...]


def run_segment(run: SegmentRun) -> None:
    """Run a segment forward; leaves the results in their values, with backward behind them."""
    for v in run.stored:
        v.handle = Handle(v.space, v.dtype, v.device, run.at, run.ledger, run.half, run.constants(), run.team)
    lease = Lease(tuple(leased(run)))
    marker = torch.empty(0)

    def pack(t: Tensor) -> Any:
        return lease if t is marker else t

    with (
        torch.set_grad_enabled(run.trains),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: marker if isinstance(kept, Lease) else kept),
    ):
        results = SegmentFunction.apply(run, marker, *run.inputs())
    for v, result in zip([*run.outputs, *run.stored], results, strict=True):
        if v.is_map:
            v.token = result
        else:
            v.real = result


def leased(run: SegmentRun) -> list[Handle]:
    """The boundaries that a segment reads."""
    return [v.handle for v in run.boundaries if v.handle is not None]


class SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: SegmentRun, marker: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(run.kind, enabled=False):
            work = Forward(run, inputs)
            results = work.run()
        # On the segment's device, so that autograd runs all segments in one thread, in one order.
        results.extend(torch.zeros((), device=v.device) for v in run.stored)
        ctx.run = run.bare()
        if run.drop:
            handles = [v.handle for v in run.stored if v.handle is not None]
            again = Again(ctx.run, Inputs.of([t.detach() for t in inputs]), handles, leased(run))
            for handle in handles:
                handle.again = again
        ctx.carried = work.carried
        ctx.handles = [weakref.ref(v.handle) for v in run.boundaries]  # type: ignore[arg-type]
        ctx.cotangents = [v.handle.cotangent for v in run.stored]  # type: ignore[union-attr]
        ctx.results = [r.detach() for r in results]
        if run.trains:  # else there is no backward
            ctx.versions = Inputs.of(inputs).versions
            ctx.save_for_backward(marker, *inputs)
        ctx.set_materialize_grads(False)
        dead = [r for r, v in zip(results, [*run.outputs, *run.stored], strict=True) if not v.requires_grad]
        ctx.mark_non_differentiable(*dead)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *inputs = ctx.saved_tensors
        Inputs(inputs, ctx.versions).check()
        ledger = ctx.run.ledger
        if ledger is not None:
            ledger.enter((ctx.run.place, "backward"))
        with watched(ledger):
            return Backward(ctx, inputs, grads).run()
