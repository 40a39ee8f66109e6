"""Max pooling, its indices, average pooling, and max unpooling."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box, Window
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import SeparableOp
from lightning_plugin.private import operator_name, schema
from lightning_plugin.rules.channels import arguments, over_last_dims
from lightning_plugin.rules.convolution import Stamp
from lightning_plugin.rules.reductions import to_tile_positions
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.window import SlidingOp, WindowOp, axes_of_all_last, per_dim, window_fields

aten = torch.ops.aten


@dataclass(frozen=True)
class PoolOp(SlidingOp):
    """PyTorch's pooling pads at most half a window, and in some cases no input smaller than a window."""

    def can_pad(self, window: Window, size: int, padding: int) -> bool:
        return 2 * padding <= window.kernel and size > window.dilation * (window.kernel - 1)


@dataclass(frozen=True)
class MaxPool(PoolOp):
    uniform: ClassVar[bool] = True

    def slide(self, box: Box, x: Tensor, vectors: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.all_windows) - 1]
        kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in self.all_windows), strict=True)
        return pool(x, kernel, stride, tuple(padding), dilation)

    def padding_value(self, x: Tensor) -> float:
        return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min


@over_last_dims(
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.max_pool1d.default, kind="window"
)
def max_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Indices, which are positions in the whole map, have a node of their own: if no operator reads them, it costs
    nothing."""
    count = 3 if "3d" in schema(func).name else 2
    x, kernel, stride, padding, dilation, _ = arguments(func, args, kwargs).values()
    kernel = per_dim(kernel, count)
    stride = per_dim(stride, count) if stride else kernel
    windows = tuple(map(Window, kernel, stride, per_dim(dilation, count), per_dim(padding, count)))
    found = window_fields(x, windows, outs[0].shape)
    if found is None:
        return NotImplemented
    fields, layout = found
    out = rec.emit(MaxPool(**fields), [x], outs[:1], layout, "max_pool")
    return (
        out
        if len(outs) == 1
        else (*out, *rec.emit(MaxPoolIndices(**fields), [x], outs[1:], layout, "max_pool indices"))
    )


@dataclass(frozen=True)
class MaxPoolIndices(WindowOp):
    """Flat position, in the whole map, of each window's maximum. Plain window dimensions have size one."""

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return lo, hi

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = F.pad(tiles[0], self.tile_padding(box), value=-math.inf)
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.all_windows) - 1]
        kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in self.all_windows), strict=True)
        _, rest = pool(x, kernel, stride, 0, dilation, return_indices=True)
        sizes = [x.shape[d] for d in range(-len(kernel), 0) if not self.plain or self.plain[d] is None]
        total, step = torch.zeros_like(rest), 1
        for size, clip, axis in reversed(list(zip(sizes, self.clips(box), self.axes, strict=True))):
            total = total + (rest % size + clip.lo - clip.before) * step
            rest = rest // size
            step *= self.extent[axis]
        return total


@dataclass(frozen=True)
class AvgPool(PoolOp):
    """Average pooling. The divisor of a window beyond the border of the map depends on its position.

    Attributes:
        count_padding: Padding counts in the divisor.
        divisor: The user's divisor, for all windows.
        padding: Padding of the map.
    """

    uniform: ClassVar[bool] = True
    count_padding: bool = True
    divisor: int | None = None
    padding: tuple[int, ...] = ()

    def slide(self, box: Box, x: Tensor, vectors: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
        kernel, stride = zip(*((w.kernel, w.stride) for w in self.all_windows), strict=True)
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        out = pool(x, kernel, stride, tuple(padding))
        size = math.prod(kernel)
        if self.divisor is not None:
            return out * (size / self.divisor)
        cut = iter(self.counts(box))
        for d, w in enumerate(self.all_windows, -len(kernel)):
            # A dimension without an axis is whole in each tile.
            is_cut = not self.plain or self.plain[d] is None
            count = next(cut) if is_cut else self.divisors(w, x.shape[d], w.before, range(out.shape[d]))
            if count is not None:
                scale = torch.tensor([w.kernel / c for c in count], dtype=out.dtype, device=out.device)
                out = out * scale.view(-1, *[1] * (-d - 1))
        return out

    def on_split(self, windows: tuple[Window, ...], extent: tuple[int, ...], after: Sequence[int | None]) -> SlidingOp:
        """Padding at the border of a split counts as at the border of the map."""
        padding = tuple(p if a is None else a for p, a in zip(self.padding, after, strict=True))
        return replace(self, windows=windows, extent=extent, padding=padding)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Padding of the tile, and divisors."""
        pads = super().mark(axis, lo, hi)
        places = [i for i, a in enumerate(self.axes) if a == axis]
        return pads, *(tuple(self.window_counts(i, lo, hi) or ()) for i in places)

    def counts(self, box: Box) -> list[list[int] | None]:
        """Return the divisors of windows along each axis; None if they are those of whole windows."""
        return [self.window_counts(i, box.lo[a], box.hi[a]) for i, a in enumerate(self.axes)]

    def window_counts(self, i: int, lo: int, hi: int) -> list[int] | None:
        return self.divisors(self.windows[i], self.extent[self.axes[i]], self.padding[i], range(lo, hi))

    def divisors(self, w: Window, size: int, padding: int, places: Iterable[int]) -> list[int] | None:
        """Return the divisors of windows on a dimension of a size; None if they are those of whole windows."""
        line = []
        for o in places:
            start = o * w.stride - w.before
            end = min(start + w.kernel, size + padding)
            if not self.count_padding:
                start, end = max(start, 0), min(end, size)
            line.append(end - start)
        return None if all(c == w.kernel for c in line) else line


@over_last_dims(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool1d.default, kind="window")
def avg_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    count = int(schema(func).name[-2])
    x, kernel, stride, padding, _, count_padding, *divisor = arguments(func, args, kwargs).values()
    kernel, padding = per_dim(kernel, count), per_dim(padding, count)
    stride = per_dim(stride, count) if stride else kernel
    if kernel == x.shape[-count:] and not any(padding) and divisor in ([], [None]) and math.prod(kernel) > 1:
        return rec.decompose(torch.mean, x, list(range(-count, 0)), keepdim=True)  # a reduction over tiles
    found = window_fields(x, tuple(map(Window, kernel, stride, (1,) * count, padding)), outs[0].shape)
    if found is None:
        return NotImplemented
    fields, layout = found
    own = tuple(w.before for w in fields["windows"])
    op = AvgPool(**fields, count_padding=count_padding, divisor=divisor[0] if divisor else None, padding=own)
    return rec.emit(op, [x], outs, layout, operator_name(func))


@dataclass(frozen=True)
class Unpool(SeparableOp):
    """Max unpooling. Its maps are values and indices, flat positions in the output, which has ``extent``."""

    kind: ClassVar[str] = "resample"
    extent: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        """Return the windows with a position in the box; windows do not overlap."""
        return super().need(box) * 2

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return lo, hi

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x, where = tiles
        count = len(self.axes)
        place, inside = to_tile_positions(where, box, self.axes, [self.extent[a] for a in self.axes])
        step = math.prod(box.extent[a] for a in self.axes)
        # Values outside the box go to one place behind it, which is cut off.
        place = torch.where(inside, place, step).flatten(-count)
        out = x.new_zeros(*x.shape[:-count], step + 1).scatter(-1, place, x.flatten(-count))
        return out[..., :step].unflatten(-1, [box.hi[a] - box.lo[a] for a in self.axes])


@ATEN.rule(aten.max_unpool2d.default, aten.max_unpool3d.default, kind="resample")
def max_unpool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Tiled for the indices of a pooling without overlaps, to the size of its input."""
    x, indices, size = args[0], args[1], tuple(args[2])
    pool = pooling_of(indices)
    axes = axes_of_all_last(x, len(size)) if x.is_map else None
    if pool is None or axes is None or axes != pool.axes or indices.space.extent != x.space.extent:
        return NotImplemented
    extent = pool.extent
    if tuple(extent[a] for a in axes) != size or any(w.kernel > w.stride or w.dilation != 1 for w in pool.windows):
        return NotImplemented
    stamps = tuple(
        Stamp(w.kernel, w.stride, 1, w.before, x.space.extent[a]) for w, a in zip(pool.windows, axes, strict=True)
    )
    op = Unpool(stamps, axes, extent)
    return rec.emit(op, [x, indices], outs, Layout(x.space.dims, extent), "max_unpool")[0]


def pooling_of(indices: Value) -> MaxPoolIndices | None:
    """Return the pooling that indices come from; None for other indices."""
    op = indices.node.op if indices.is_map and indices.node is not None else None
    return op if isinstance(op, MaxPoolIndices) else None
