"""Operators along some of the axes of space: sums of rows, running sums down columns, a softmax over positions.

A reduction over *some* of the axes has results that still lie in space: each tile adds to its slice of them. Where the
result has more than one axis left it is a map itself, and the operator reads the reduced axes whole, as one that mixes
positions along an axis does.

    softmax(x) = exp(x - m) / s        m = max x,   s = Σ exp(x - m)

so a softmax over all positions is one reduction, to (s, m), and one broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Dim, Layout
from lightning_plugin.ops import Call, ReduceOp, Reduction, TileOp, accumulation_dtype
from lightning_plugin.rules.channels import arguments, name_of, reduced, within
from lightning_plugin.rules.pointwise import broadcast, local
from lightning_plugin.rules.reductions import ExpSum, SpaceOp, covers
from lightning_plugin.rules.table import ATEN, Recorder, Rule
from lightning_plugin.rules.uncut import axes_under

aten = torch.ops.aten


@dataclass(frozen=True)
class Strip(TileOp):
    """An operator that needs some axes whole; in its output these are whole still, or of extent one."""

    kind: ClassVar[str] = "window"
    call: Call
    extent: tuple[int, ...]
    axes: tuple[int, ...]
    output: Layout

    def need(self, box: Box) -> tuple[Box, ...]:
        for a in self.axes:
            box = box.replace(a, 0, self.extent[a])
        return (box,)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The part of an axis that is computed whole."""
        return (lo, hi) if axis in self.axes else None

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        out = self.call([*tiles, *vectors])
        return self.output.narrow(out, Box.of(self.held(box)), box)

    def held(self, box: Box) -> list[tuple[int, int]]:
        """Interval of each axis that the call computes: all of one that it needed whole and keeps."""
        return [
            (0, self.output.extent[a]) if a in self.axes else (lo, hi) for a, (lo, hi) in enumerate(box.intervals())
        ]


def whole_axes(rec: Recorder, value: Value, dims: Sequence[int]) -> list[int] | None:
    """The axes under some dimensions; None where no other axis of space is left to tile.

    That images are tiled among each other does not do: each might be more than a tile can hold.
    """
    axes = sorted({f.index for d in dims for f in value.space.dims[d] if isinstance(f, Axis)})
    return axes if any(a not in axes for a in cut_in_space(rec, value.space)) else None


def cut_in_space(rec: Recorder, layout: Layout) -> list[int]:
    """The axes of a layout that are space, and have more than one position."""
    return [a for a, size in enumerate(layout.extent) if size > 1 and a not in rec.session.instance_axes]


def along_axis(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], dims: Sequence[int]) -> Any:
    """An operator that keeps its map's shape and mixes positions only along the axes of ``dims``."""
    x = args[0]
    axes = whole_axes(rec, x, dims)
    if axes is None or len(outs) != 1 or tuple(outs[0].shape) != x.shape:
        return NotImplemented
    values, new_args, new_kwargs = rec.template(args, kwargs)
    if len(values) != 1:
        return NotImplemented
    op = Strip(Call(func, new_args, new_kwargs), x.space.extent, tuple(axes), x.space)
    return rec.emit(op, [x], outs, x.space, name_of(func))


@ATEN.rule(
    aten.cumsum, aten.cumprod, aten.logcumsumexp, aten._safe_softmax, aten.glu, aten.sort, kind="local or window"
)
def along_dim(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Along channels, or along one axis; running sums along all of space are a barrier."""
    dim = arguments(func, args, kwargs)["dim"] % len(args[0].shape)
    found = within(rec, func, args, kwargs, outs, [dim])
    return along_axis(rec, func, args, kwargs, outs, [dim]) if found is NotImplemented else found


@dataclass(frozen=True)
class Slices(Reduction):
    """Partial results that lie in space: those of ``box``."""

    box: Box


@dataclass(frozen=True)
class Projection(ReduceOp):
    """A reduction over some of the axes: ``inner`` reduces a tile, ``result`` is how the rest lies."""

    inner: ReduceOp
    result: Layout
    ties: Layout
    blank: tuple[float, ...]

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.inner.uniform

    def need(self, box: Box) -> tuple[Box, ...]:
        return self.inner.need(box)

    def lands(self, box: Box) -> Hashable:
        return self.left(box)

    def repeat(self, part: Reduction, times: int) -> Reduction:
        assert isinstance(part, Slices)
        return Slices(self.inner.repeat(Reduction(part.parts), times).parts, part.box)

    def left(self, box: Box) -> Box:
        """The part of the result that an input box adds to."""
        return box.broadcast(self.result.extent)

    def layouts(self, parts: Sequence[Tensor]) -> list[Layout]:
        """Parts that keep the reduced dimensions lie as `ties`, maybe with one more behind them; the others as the
        result."""
        kept = len(self.ties.dims)
        return [
            self.result
            if p.dim() < kept
            else self.ties
            if p.dim() == kept
            else Layout((*self.ties.dims, (p.shape[-1],)), self.ties.extent)
            for p in parts
        ]

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        parts = self.inner.partial(box, tiles, vectors).parts
        parts = tuple(p.expand(parts[-1].shape) if p.dim() == 0 else p for p in parts)
        return Slices(parts, self.left(box))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        assert isinstance(left, Slices) and isinstance(right, Slices)
        total = self.whole(left)
        layouts = self.layouts(total.parts)
        old = [lay.narrow(p, total.box, right.box) for lay, p in zip(layouts, total.parts, strict=True)]
        new = self.inner.merge(Reduction(tuple(old)), right).parts
        for lay, part, value in zip(layouts, total.parts, new, strict=True):
            lay.write_into(part, total.box, value, right.box)
        return total

    def whole(self, part: Slices) -> Slices:
        """A partial result as the running one: everything that no tile has added to yet is blank."""
        full = Box.whole(self.result.extent)
        if part.box == full and all(p.is_contiguous() for p in part.parts):
            return part
        parts = []
        for lay, p, blank in zip(self.layouts(part.parts), part.parts, self.blank, strict=True):
            if math.isinf(blank) and not p.is_floating_point():
                blank = torch.iinfo(p.dtype).max if blank > 0 else torch.iinfo(p.dtype).min
            running = torch.full(lay.shape, blank, dtype=p.dtype, device=p.device)
            lay.write_into(running, full, p, part.box)
            parts.append(running)
        return Slices(tuple(parts), full)

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert isinstance(total, Slices)
        return self.inner.finish(self.whole(total), vectors)

    @property
    def seeks(self) -> bool:
        return self.inner.seeks

    def uncertain(self, outputs: Sequence[Tensor], shared: bool) -> bool:
        return self.inner.uncertain(outputs, shared)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        full, mine = Box.whole(self.result.extent), self.left(box)
        layouts = self.layouts(outputs)
        here = [lay.narrow(o, full, mine) for lay, o in zip(layouts, outputs, strict=True)]
        pulls = self.inner.pull(box, tiles, vectors, here)
        return tuple(None if p is None else Embed.apply(p, lay, mine) for p, lay in zip(pulls, layouts, strict=True))


class Embed(torch.autograd.Function):
    """A slice in its place of a whole, as far as a derivative goes; nobody looks at the whole's values."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout, box: Box) -> Tensor:
        ctx.layout, ctx.box = layout, box
        return part.new_zeros(()).expand(layout.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.layout.narrow(grad, Box.whole(ctx.layout.extent), ctx.box), None, None


def projected(value: Value, dims: Sequence[int], keep: bool) -> Layout:
    """The layout after reducing ``dims``, whose axes have extent one and move to the front."""
    gone = {f.index for d in dims for f in value.space.dims[d] if isinstance(f, Axis)}
    extent = tuple(1 if a in gone else size for a, size in enumerate(value.space.extent))
    left: list[Dim] = [(1,) if d in dims else dim for d, dim in enumerate(value.space.dims) if keep or d not in dims]
    left[0] = (*(Axis(a) for a in sorted(gone)), *left[0])
    return Layout(tuple(left), extent)


def along(inner: SpaceOp, x: Value) -> Projection:
    """A reduction whose dimensions hold some of a map's axes."""
    return Projection(inner, projected(x, inner.dims, inner.keep), projected(x, inner.dims, True), inner.blank)


def over(rec: Recorder, op: SpaceOp, x: Value, fakes: Sequence[Tensor], name: str, grad: bool = True) -> Any:
    """A node that reduces all of space, or so many axes of it that the result is a vector."""
    if covers(x, op.dims):
        return rec.emit(op, [x], fakes, None, name, grad=grad)
    projection = along(op, x)
    if len(cut_in_space(rec, projection.result)) > 1:
        return NotImplemented
    return rec.emit(projection, [x], fakes, None, name, grad=grad)


def reduction(*functions: Any, kind: str = "local or reduce") -> Callable[[Rule], Rule]:
    """Register a rule for reductions over all of space, or so many of its axes that a vector is left.

    Others need no rule of their own: over plain dimensions they are local, and where so many axes are left that the
    result is a map, each of its tiles needs the reduced axes whole.
    """

    def add(rule: Rule) -> Rule:
        def asked(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
            x = args[0]
            dims, keep = reduced(func, args, kwargs)
            found = within(rec, func, args, kwargs, outs, dims) if len(dims) < len(x.shape) else NotImplemented
            if found is not NotImplemented:
                return found
            if covers(x, dims):
                return rule(rec, func, args, kwargs, outs)
            layout, axes = projected(x, dims, keep), whole_axes(rec, x, dims)
            if len(cut_in_space(rec, layout)) < 2:
                found = rule(rec, func, args, kwargs, outs)
            if found is not NotImplemented or axes is None or len(outs) > 1:
                return found
            _, new_args, new_kwargs = rec.template(args, kwargs)
            op = Strip(Call(func, new_args, new_kwargs), x.space.extent, tuple(axes), layout)
            return rec.emit(op, [x], outs, layout, name_of(func))

        ATEN.rule(*functions, kind=kind)(asked)
        return rule

    return add


# A softmax over positions ---------------------------------------------------------------------------------


def apply_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.to(total.dtype) - top).exp() / total).to(dtype)


def apply_log_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(total.dtype) - top - total.log()).to(dtype)


def left(x: Value, dim: int) -> set[int]:
    """The axes of a map that lie in other dimensions."""
    return axes_under(x, [d for d in range(len(x.shape)) if d != dim])


@ATEN.rule(aten._softmax, aten._log_softmax, kind="local or reduce + local")
def softmax(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Along channels or one axis; or over a dimension that holds all of space, of all images together or of each."""
    found = along_dim(rec, func, args, kwargs, outs)
    if found is not NotImplemented:
        return found
    x, dim = args[0], args[1] % len(args[0].shape)
    apart = not covers(x, [dim])
    if apart and any(a not in rec.session.instance_axes for a in left(x, dim)):
        return NotImplemented
    dtype = accumulation_dtype(outs[0].dtype)
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    sums = ExpSum((dim,), True, dtype, x.shape[dim])
    total, top = over(rec, sums, x, [rec.fake(shape, dtype, x.device) for _ in range(2)], "softmax sum")
    if apart:
        found = broadcast(rec, [x, total, top], x.shape)
        if found is None:
            return NotImplemented
        x, total, top = found[0]
    apply = apply_softmax if func is aten._softmax.default else apply_log_softmax
    return local(rec, apply, [x, total, top, outs[0].dtype], {}, outs[0], x.space, name=name_of(func))
