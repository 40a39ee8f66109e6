"""Operators that mix positions along some axes and keep the shape: running sums, sorting, softmax.

A tile of the result reads these axes whole, if an axis of space is left to tile. Over all of space,

    softmax(x) = exp(x - m) / s        m = max x,   s = Σ exp(x - m)

so that a softmax is one reduction, to s and m, and one local operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import Call, TileOp, accumulation_dtype
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import arguments, local_on_plain
from lightning_plugin.rules.pointwise import broadcast, local
from lightning_plugin.rules.reductions import ExpSum, covers_space, cut_space_axes, record_reduction
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under

aten = torch.ops.aten


@dataclass(frozen=True)
class WholeAxes(TileOp):
    """Call that reads some axes whole.

    Attributes:
        call: The call.
        extent: Extent of its input.
        axes: The axes; the output has all their positions, or one.
        output: Layout of the output.
    """

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
        """Interval of an axis that is read whole: its results differ by position."""
        return (lo, hi) if axis in self.axes else None

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        out = self.call([*tiles, *vectors])
        return self.output.narrow(out, Box.of(self.computed_box(box)), box)

    def computed_box(self, box: Box) -> list[tuple[int, int]]:
        """Return the intervals that the call computes for a box: all of the axes that it reads whole."""
        return [
            (0, self.output.extent[a]) if a in self.axes else (lo, hi) for a, (lo, hi) in enumerate(box.intervals())
        ]


def whole_axes(rec: Recorder, value: Value, dims: Sequence[int]) -> list[int] | None:
    """Return the axes in some dimensions; None if no other axis of space is left to tile.

    Tiles of images alone do not suffice: one image may be too large for a tile.
    """
    axes = sorted({f.index for d in dims for f in value.space.dims[d] if isinstance(f, Axis)})
    return axes if any(a not in axes for a in cut_space_axes(rec, value.space)) else None


def along_axis(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], dims: Sequence[int]) -> Any:
    """Record an operator that keeps the shape and mixes positions only along the axes in ``dims``."""
    x = args[0]
    axes = whole_axes(rec, x, dims)
    if axes is None or len(outs) != 1 or tuple(outs[0].shape) != x.shape:
        return NotImplemented
    values, new_args, new_kwargs = rec.template(args, kwargs)
    if len(values) != 1:
        return NotImplemented
    op = WholeAxes(Call(func, new_args, new_kwargs), x.space.extent, tuple(axes), x.space)
    return rec.emit(op, [x], outs, x.space, operator_name(func))


@ATEN.rule(
    aten.cumsum, aten.cumprod, aten.logcumsumexp, aten._safe_softmax, aten.glu, aten.sort, kind="local or window"
)
def along_dim(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Along channels, or along axes if one of space is left; else a barrier."""
    dim = arguments(func, args, kwargs)["dim"] % len(args[0].shape)
    found = local_on_plain(rec, func, args, kwargs, outs, [dim])
    return along_axis(rec, func, args, kwargs, outs, [dim]) if found is NotImplemented else found


# A softmax over positions ---------------------------------------------------------------------------------


def apply_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.to(total.dtype) - top).exp() / total).to(dtype)


def apply_log_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(total.dtype) - top - total.log()).to(dtype)


def other_axes(x: Value, dim: int) -> set[int]:
    """Return the axes of a map in all dimensions but ``dim``."""
    return axes_under(x, [d for d in range(len(x.shape)) if d != dim])


@ATEN.rule(aten._softmax, aten._log_softmax, kind="local or reduce + local")
def softmax(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Along channels, along axes as `along_dim`, or over a dimension with all of space: of all images, or of each."""
    found = along_dim(rec, func, args, kwargs, outs)
    if found is not NotImplemented:
        return found
    x, dim = args[0], args[1] % len(args[0].shape)
    apart = not covers_space(x, [dim])
    if apart and any(a not in rec.session.instance_axes for a in other_axes(x, dim)):
        return NotImplemented
    dtype = accumulation_dtype(outs[0].dtype)
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    sums = ExpSum((dim,), True, dtype, x.shape[dim])
    total, top = record_reduction(rec, sums, x, [rec.fake(shape, dtype, x.device) for _ in range(2)], "softmax sum")
    if apart:
        found = broadcast(rec, [x, total, top], x.shape)
        if found is None:
            return NotImplemented
        x, total, top = found[0]
    apply = apply_softmax if func is aten._softmax.default else apply_log_softmax
    return local(rec, apply, [x, total, top, outs[0].dtype], {}, outs[0], x.space, name=operator_name(func))
