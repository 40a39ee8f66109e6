"""One segment as one `autograd.Function`.

Inputs are the tensors that a segment's operators use (parameters among them, so that each gradient reaches its
parameter once a step), and a *token* for each boundary it reads: a number that carries no data and only tells autograd
in which order segments have to run backward. Forward evaluates tile by tile without grad. Backward evaluates each tile
again with grad, and pulls back the tile's cotangents: its slice of each stored map's, and the same vector for each
reduction. Nothing is left of a tile when the next one begins.

[Note: leases] A boundary is held by those segments that will read it in backward. They hold it as something saved for
backward, so that it goes when autograd lets go of it: after the segment's backward, or never, with retain_graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.program import Program, Target
from lightning_plugin.execute.rehearsal import tiles_of
from lightning_plugin.execute.store import Adder, Cotangent, Handle
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger
from lightning_plugin.rules.base import ReduceOp, Reduction, Source, Spread
from lightning_plugin.source import TensorSource


@dataclass(frozen=True, eq=False)
class Lease:
    """Keeps boundaries while autograd keeps this."""

    handles: tuple[Handle, ...]


class SegmentRun:
    """A program with its grids, and where its tensors come from."""

    def __init__(
        self,
        program: Program,
        forward: Grid,
        backward: Grid,
        tier: str = "device",
        ledger: Ledger | None = None,
        place: int = 0,
    ):
        self.program = program
        self.ledger = ledger
        self.place = place
        self.forward_grid = forward
        self.backward_grid = backward
        self.tier = tier
        self.stored = [t.stored for t in program.targets if t.stored is not None]
        self.spreads = [v for v in program.reads if resident(v) is not None]
        # An image that a kept segment has made resident is an ordinary tensor: counted here too, it would get its
        # gradient twice.
        self.images = [
            v
            for v in program.reads
            if isinstance(v.node.op, Source) and v.requires_grad and _tensor(v) is not None and resident(v) is None  # type: ignore[union-attr]
        ]
        self.boundaries = [v for v in program.reads if v.handle is not None and resident(v) is None]
        self.outputs = [v for t in program.targets if t.stored is None for v in t.node.outputs]
        self.trains = any(v.requires_grad for v in (*self.outputs, *self.stored))

    def bare(self) -> SegmentRun:
        """What backward needs of a run; see `Program.bare`."""
        program, values = self.program.bare()
        run = copy(self)
        run.program = program
        for name in ("stored", "spreads", "images", "boundaries", "outputs"):
            setattr(run, name, [values[id(v)] for v in getattr(self, name)])
        # Nodes and values point at each other: taken apart when autograd lets go, they do not wait for the garbage
        # collector, and neither does the image that they read.
        weakref.finalize(run, take_apart, program.steps).atexit = False
        return run

    def inputs(self) -> list[Tensor]:
        """The tensors autograd has to know: vectors, spread vectors, images with grad, tokens."""
        vectors = [_real(v) for v in self.program.vectors]
        spreads = [resident(v) for v in self.spreads]
        images = [_tensor(v) for v in self.images]
        return [*vectors, *spreads, *images, *(v.token for v in self.boundaries)]  # type: ignore[list-item]

    def apply(self) -> None:
        """Run forward; leaves the results in their values."""
        for v in self.stored:
            v.handle = Handle(v.space, v.dtype, v.device, self.tier, self.ledger)
        lease = Lease(tuple(v.handle for v in self.boundaries if v.handle is not None))
        marker = torch.empty(0)

        def pack(t: Tensor) -> Any:
            return lease if t is marker else t

        with (
            torch.set_grad_enabled(self.trains),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: marker if isinstance(kept, Lease) else kept),
        ):
            results = SegmentFunction.apply(self, marker, *self.inputs())
        for v, result in zip([*self.outputs, *self.stored], results, strict=True):
            if v.is_map:
                v.token = result
            else:
                v.real = result


def watched(ledger: Ledger | None) -> AbstractContextManager[None]:
    """A block whose operators a ledger counts, if there is one."""
    return nullcontext() if ledger is None else ledger.watching()


def take_apart(nodes: Sequence[Node]) -> None:
    for node in nodes:
        for v in node.outputs:
            v.node = None


def resident(v: Value) -> Tensor | None:
    """The ordinary tensor that a map lies in: a spread vector, or a kept map."""
    if v.node is not None and isinstance(v.node.op, Spread):
        return _real(v.node.inputs[0])
    return v.real


def _real(v: Value) -> Tensor:
    if v.real is None:
        raise AssertionError(f"{v.label} is needed before it is computed")
    return v.real


def _tensor(v: Value) -> Tensor | None:
    image = v.node.op.image  # type: ignore[union-attr]
    return image.tensor if isinstance(image, TensorSource) else None


class SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: SegmentRun, marker: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        program = run.program
        vectors = {id(v): t.detach() for v, t in zip(program.vectors, inputs, strict=False)}
        spreads = {id(v): t.detach() for v, t in zip(run.spreads, inputs[len(program.vectors) :], strict=False)}
        totals: dict[int, Reduction] = {}

        def read(v: Value, box: Box) -> Tensor:
            return _read(v, box, spreads, v.handle)

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            target = program.targets[i]
            if target.stored is not None:
                target.stored.handle.write(box, tiles[0])  # type: ignore[union-attr]
                return
            op = target.node.op
            assert isinstance(op, ReduceOp)
            part = op.partial(box, tiles, [vectors[id(v)] for v in target.node.vectors])
            totals[i] = op.merge(totals[i], part) if i in totals else part

        with torch.autocast(_kind(inputs, run), enabled=False):
            for owned in tiles_of(program, run.forward_grid, False):
                program.run(owned, read, vectors, emit, grad=False)
            results: list[Tensor] = []
            for i, target in enumerate(program.targets):
                if target.stored is None:
                    op = target.node.op
                    assert isinstance(op, ReduceOp)
                    results.extend(op.finish(totals[i], [vectors[id(v)] for v in target.node.vectors]))
        results.extend(torch.zeros(()) for _ in run.stored)
        ctx.run = run.bare()
        ctx.handles = [weakref.ref(v.handle) for v in run.boundaries]  # type: ignore[arg-type]
        ctx.cotangents = [v.handle.cotangent for v in run.stored]  # type: ignore[union-attr]
        ctx.results = [r.detach() for r in results]
        if run.trains:  # else there is no backward, and inputs may be inference tensors
            ctx.versions = [t._version for t in inputs]
            ctx.save_for_backward(marker, *inputs)
        ctx.set_materialize_grads(False)
        dead = [r for r, v in zip(results, [*run.outputs, *run.stored], strict=True) if not v.requires_grad]
        ctx.mark_non_differentiable(*dead)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *inputs = ctx.saved_tensors
        for t, version in zip(inputs, ctx.versions, strict=False):
            if t._version != version:
                raise RecordingError(
                    f"a tensor of shape {tuple(t.shape)} that the forward pass used was changed in place before "
                    "backward (an optimizer step between forward and backward, say). Its old value is needed."
                )
        ledger = ctx.run.ledger
        if ledger is not None:
            ledger.enter((ctx.run.place, "backward"))
        with watched(ledger):
            return Backward(ctx, inputs, grads).run()


class Backward:
    """One backward pass of a segment."""

    def __init__(self, ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self.segment: SegmentRun = ctx.run
        self.ctx = ctx
        program = self.segment.program
        needs = ctx.needs_input_grad[2:]
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        first, second = len(program.vectors), len(program.vectors) + len(self.segment.spreads)
        self.vectors = {id(v): t for v, t in zip(program.vectors, self.leaves, strict=False)}
        self.spreads = {id(v): t for v, t in zip(self.segment.spreads, self.leaves[first:], strict=False)}
        self.images = {id(v): t for v, t in zip(self.segment.images, self.leaves[second:], strict=False)}
        self.handles: dict[int, Handle] = {
            id(v): ref() for v, ref in zip(self.segment.boundaries, ctx.handles, strict=True)
        }
        self.needs = needs
        self.adders = {i: Adder(t) for i, t in enumerate(self.leaves[:first]) if t.requires_grad}
        self.wholes: dict[int, tuple[Tensor, Layout]] = {}
        self.cotangents(grads)

    def cotangents(self, grads: Sequence[Tensor | None]) -> None:
        """Which targets have a cotangent, and what it is."""
        program = self.segment.program
        self.alive: list[Target] = []
        self.reduced: list[tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]] | None] = []
        self.maps: list[Cotangent | None] = []
        place = 0
        kept = {id(v): c for v, c in zip(self.segment.stored, self.ctx.cotangents, strict=True)}
        for t in program.targets:
            if t.stored is None:
                count = len(t.node.outputs)
                mine = tuple(grads[place : place + count])
                results = tuple(self.ctx.results[place : place + count])
                place += count
                if any(g is not None for g in mine):
                    self.alive.append(t)
                    self.reduced.append((mine, results))
                    self.maps.append(None)
                continue
            cotangent = kept[id(t.stored)]
            if cotangent.data is not None:
                self.alive.append(t)
                self.reduced.append(None)
                self.maps.append(cotangent)

    def run(self) -> tuple[Tensor | None, ...]:
        segment = self.segment
        if self.alive and any(self.needs):
            available = {id(v) for v in segment.program.reads}
            program = Program.build(self.alive, lambda v: id(v) in available)
            with torch.autocast(_kind(self.leaves, segment), enabled=False):
                for owned in tiles_of(program, segment.backward_grid, True):
                    self.tile(program, owned)
        for cotangent in self.maps:
            if cotangent is not None:
                cotangent.clear()
        vectors = [self.adders[i].result() if i in self.adders else None for i in range(len(segment.program.vectors))]
        spreads = [self.whole(v, self.spreads[id(v)].dtype) for v in segment.spreads]
        images = [self.whole(v, v.dtype) for v in segment.images]
        tokens = [torch.zeros(()) if need else None for need in self.needs[len(self.needs) - len(segment.boundaries) :]]
        return (None, None, *vectors, *spreads, *images, *tokens[: len(segment.boundaries)])

    def whole(self, v: Value, dtype: torch.dtype) -> Tensor | None:
        found = self.wholes.get(id(v))
        return None if found is None else found[0].to(dtype)

    def tile(self, program: Program, owned: Sequence[Box]) -> None:
        reads: list[tuple[Value, Box, Tensor]] = []
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []

        def read(v: Value, box: Box) -> Tensor:
            tile = _read(v, box, self.spreads, self.handles.get(id(v))).detach()
            wanted = v.requires_grad and (
                id(v) in self.handles
                or id(v) in self.images
                or (id(v) in self.spreads and self.spreads[id(v)].requires_grad)
            )
            if wanted:
                tile.requires_grad_()
                reads.append((v, box, tile))
            return tile

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            target, reduction, cotangent = program.targets[i], self.reduced[i], self.maps[i]
            if cotangent is not None:
                outputs.append(tiles[0])
                cotangents.append(cotangent.read(box))
                return
            assert reduction is not None
            grads, results = reduction
            op = target.node.op
            assert isinstance(op, ReduceOp)
            with torch.enable_grad():
                pulls = op.pull(box, tiles, [self.vectors[id(v)] for v in target.node.vectors], results)
            for value, g in zip(pulls, grads, strict=True):
                if value is not None and g is not None and value.requires_grad:
                    outputs.append(value)
                    cotangents.append(g)

        program.run(owned, read, self.vectors, emit, grad=True)
        leaves = [self.leaves[i] for i in self.adders] + [t for _, _, t in reads]
        live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        if not live or not leaves:
            return
        found = torch.autograd.grad([o for o, _ in live], leaves, [c for _, c in live], allow_unused=True)
        for i, g in zip(self.adders, found, strict=False):
            self.adders[i].add(g)
        for (v, box, _), g in zip(reads, found[len(self.adders) :], strict=True):
            if g is not None:
                self.give(v, box, g)

    def give(self, v: Value, box: Box, gradient: Tensor) -> None:
        """Scatter-add a tile's input gradient, halo and all, to where the input lives."""
        handle = self.handles.get(id(v))
        if handle is not None:
            handle.cotangent.add(box, gradient)
            return
        layout = v.space
        if id(v) not in self.wholes:
            like = self.spreads.get(id(v), self.images.get(id(v)))
            assert like is not None
            self.wholes[id(v)] = (
                torch.zeros_like(
                    like, dtype=torch.promote_types(like.dtype, torch.float32), memory_format=torch.contiguous_format
                ),
                layout,
            )
        layout.add_into(self.wholes[id(v)][0], Box.whole(layout.extent), gradient.to(self.wholes[id(v)][0].device), box)


def _read(v: Value, box: Box, spreads: dict[int, Tensor], handle: Handle | None) -> Tensor:
    if handle is not None:
        return handle.read(box)
    if id(v) in spreads:
        return v.space.narrow(spreads[id(v)], Box.whole(v.space.extent), box)
    return v.node.op.read(box)  # type: ignore[union-attr]


def _kind(tensors: Sequence[Tensor], run: SegmentRun) -> str:
    """The device type a segment runs on."""
    for t in run.program.targets:
        kind = t.map.device.type
        return kind if torch.amp.is_autocast_available(kind) else "cpu"
    return "cpu"


class GatherFunction(torch.autograd.Function):
    """A boundary as one ordinary tensor; its gradient joins the boundary's cotangent."""

    @staticmethod
    def forward(ctx: Any, value: Value, handle: Handle, token: Tensor) -> Tensor:
        ctx.cotangent = handle.cotangent
        ctx.whole = handle.whole
        ctx.ledger = handle.ledger
        out = handle.read(handle.whole)
        if not value.requires_grad:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with watched(ctx.ledger):
            ctx.cotangent.add(ctx.whole, grad)
        return None, None, torch.zeros(())
