"""Window operators: convolutions and pooling.

Padding happens here, at the operator's own border: a tile reads what lies inside the map and pads what does not, so an
interior tile pads nothing, and a border tile pads only on the side where the map ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box, Clip, Window
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.rules.base import TileOp
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.table import ATEN, filled

aten = torch.ops.aten


@dataclass(frozen=True)
class WindowOp(TileOp):
    """An operator that slides windows over the last dimensions of its map; ``axes[i]`` is the axis of the i-th."""

    kind: ClassVar[str] = "window"
    windows: tuple[Window, ...]
    axes: tuple[int, ...]
    extent: tuple[int, ...]

    def clips(self, box: Box) -> tuple[Clip, ...]:
        """For each window dimension, what to read and what to pad."""
        return tuple(
            Clip.at(*w.need(box.lo[a], box.hi[a]), self.extent[a]) for w, a in zip(self.windows, self.axes, strict=True)
        )

    def need(self, box: Box) -> tuple[Box, ...]:
        for clip, a in zip(self.clips(box), self.axes, strict=True):
            box = box.replace(a, clip.lo, clip.hi)
        return (box,)

    def pads(self, box: Box) -> list[int]:
        """Padding of a tile in `torch.nn.functional.pad`'s order: last dimension first."""
        return [n for clip in reversed(self.clips(box)) for n in (clip.before, clip.after)]


def axes_of(value: Value, count: int) -> tuple[int, ...] | None:
    """The axes under the last ``count`` dimensions, or None where one of them is not simply an axis."""
    found = squeezed_axes(value, count)
    return found[0] if found is not None and len(found[1]) == count else None


def windowed(value: Value, count: int, shape: Sequence[int]) -> Layout:
    """The layout of a window operator's result."""
    layout = value.space
    rank = len(layout.dims)
    extent = list(layout.extent)
    dims = list(layout.dims)
    for d in range(rank - count, rank):
        (axis,) = layout.dims[d]
        extent[axis.index] = shape[d]  # type: ignore[union-attr]
    for d in range(rank - count):
        if not layout.is_space(d):
            dims[d] = (shape[d],)
    return Layout(tuple(dims), tuple(extent))


def each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """An argument that PyTorch lets users give once for all dimensions."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


@dataclass(frozen=True)
class Convolution(WindowOp):
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    bias: bool = True

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        clips = self.clips(box)
        x = tiles[0]
        padding = [0] * len(clips)
        if all(c.before == c.after >= 0 for c in clips):
            padding = [c.before for c in clips]  # the convolution pads alike on both sides itself
        elif any(c.before or c.after for c in clips):
            x = F.pad(x, self.pads(box))
        return aten.convolution.default(
            x, vectors[0], vectors[1] if self.bias else None, self.stride, padding, self.dilation, False,
            [0] * len(clips), self.groups,
        )  # fmt: skip


@ATEN.rule(aten.convolution.default)
def convolution(rec: Any, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if transposed:
        from lightning_plugin.rules import resample

        return resample.transposed(rec, args, outs)
    count = len(weight.shape) - 2
    axes = axes_of(x, count) if x.is_map else None
    if axes is None or weight.is_map or len(x.shape) != count + 2:
        return NotImplemented
    stride, padding, dilation = each(stride, count), each(padding, count), each(dilation, count)
    windows = tuple(Window(k, s, d, p) for k, s, d, p in zip(weight.shape[2:], stride, dilation, padding, strict=True))
    op = Convolution(windows, axes, x.space.extent, stride, dilation, groups, bias is not None)
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return rec.emit(op, inputs, outs, windowed(x, count, outs[0].shape), "convolution")


@dataclass(frozen=True)
class MaxPool(WindowOp):
    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        pads = self.pads(box)
        if any(pads):
            lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
            x = F.pad(x, pads, value=lowest)
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.windows) - 1]
        return pool(
            x, tuple(w.kernel for w in self.windows), tuple(w.stride for w in self.windows), 0,
            tuple(w.dilation for w in self.windows),
        )  # fmt: skip


@ATEN.rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.max_pool1d.default)
def max_pool(rec: Any, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Indices are positions in the whole map; nobody has asked for them unless they go on to an unpooling.

    They are computed by a second node, which costs nothing where it is not used.
    """
    count = 3 if "3d" in func._schema.name else 2
    x, kernel, stride, padding, dilation, _ = filled(args, None, None, None, [0], [1], False)
    kernel = each(kernel, count)
    stride = each(stride, count) if stride else kernel
    windows = tuple(
        Window(k, s, d, p)
        for k, s, d, p in zip(kernel, stride, each(dilation, count), each(padding, count), strict=True)
    )
    found = squeezed_axes(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    windows = tuple(windows[i] for i in used)
    layout = windowed_at(x, used, count, outs[0].shape)
    op = (
        MaxPool(windows, axes, x.space.extent)
        if len(used) == count
        else Squeezed(MaxPool(windows, axes, x.space.extent), count, used)
    )
    out = rec.emit(op, [x], outs[:1], layout, "max_pool")[0]
    if len(outs) == 1:
        return (out,)
    indices = MaxPoolIndices(windows, axes, x.space.extent)
    return out, rec.emit(indices, [x], outs[1:], layout, "max_pool indices")[0]


@dataclass(frozen=True)
class MaxPoolIndices(WindowOp):
    """The flat position, in the whole map, of each window's maximum."""

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = F.pad(tiles[0], self.pads(box), value=-math.inf)
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(self.windows) - 1]
        _, local_index = pool(
            x, tuple(w.kernel for w in self.windows), tuple(w.stride for w in self.windows), 0,
            tuple(w.dilation for w in self.windows), return_indices=True,
        )  # fmt: skip
        sizes = x.shape[x.dim() - len(self.windows) :]
        total = torch.zeros_like(local_index)
        step = 1
        rest = local_index
        for size, clip, axis in reversed(list(zip(sizes, self.clips(box), self.axes, strict=True))):
            total = total + (rest % size + clip.lo - clip.before) * step
            rest = rest // size
            step *= self.extent[axis]
        return total


@dataclass(frozen=True)
class Squeezed(TileOp):
    """A 1-D operator that PyTorch runs as a 2-D one on a dimension of size one."""

    kind: ClassVar[str] = "window"
    inner: WindowOp
    count: int
    used: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        return self.inner.need(box)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        unused = [x.dim() - self.count + i for i in range(self.count) if i not in self.used]
        for d in reversed(unused):
            x = x.squeeze(d)
        x = self.inner.apply(box, [x], vectors)
        for d in unused:
            x = x.unsqueeze(d)
        return x


def squeezed_axes(value: Value, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes under the last dimensions and which of these dimensions have one; the others must be of size one."""
    layout = value.space
    rank = len(layout.dims)
    axes, used = [], []
    for i, d in enumerate(range(rank - count, rank)):
        if len(layout.dims[d]) == 1 and isinstance(layout.dims[d][0], Axis):
            axes.append(layout.dims[d][0].index)  # type: ignore[union-attr]
            used.append(i)
        elif value.shape[d] != 1 or layout.is_space(d):
            return None
    return (tuple(axes), tuple(used)) if used else None


def windowed_at(value: Value, used: Sequence[int], count: int, shape: Sequence[int]) -> Layout:
    layout = value.space
    extent = list(layout.extent)
    for i in used:
        d = len(layout.dims) - count + i
        extent[layout.dims[d][0].index] = shape[d]  # type: ignore[union-attr]
    return layout.with_extent(extent)


@dataclass(frozen=True)
class AvgPool(WindowOp):
    """Sums of windows divided by how many positions count, which differs only where a window leaves the map."""

    count_padding: bool = True
    divisor: int | None = None
    padding: tuple[int, ...] = ()

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        pads = self.pads(box)
        if any(pads):
            x = F.pad(x, pads)
        kernel = tuple(w.kernel for w in self.windows)
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        out = pool(x, kernel, tuple(w.stride for w in self.windows))
        size = math.prod(kernel)
        if self.divisor is not None:
            return out * (size / self.divisor)
        counts = self.counts(box)
        if all(c is None for c in counts):
            return out
        for i, count in enumerate(counts):
            if count is not None:
                shape = [1] * len(counts)
                shape[i] = -1
                scale = torch.tensor([self.windows[i].kernel / c for c in count], dtype=out.dtype, device=out.device)
                out = out * scale.view(shape)
        return out

    def counts(self, box: Box) -> list[list[int] | None]:
        """For each dimension, how many positions of each window count; None where all do."""
        found: list[list[int] | None] = []
        for w, a, p in zip(self.windows, self.axes, self.padding, strict=True):
            size = self.extent[a]
            line = []
            for o in range(box.lo[a], box.hi[a]):
                start = o * w.stride - w.before
                end = min(start + w.kernel, size + p)
                if not self.count_padding:
                    start, end = max(start, 0), min(end, size)
                line.append(end - start)
            found.append(None if all(c == w.kernel for c in line) else line)
        return found


@ATEN.rule(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool1d.default)
def avg_pool(rec: Any, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    count = int(func._schema.name[-2])
    x, kernel, stride, padding, _, count_padding, divisor = filled(args, None, None, [], [0], False, True, None)
    kernel, padding = each(kernel, count), each(padding, count)
    stride = each(stride, count) if stride else kernel
    found = squeezed_axes(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    windows = tuple(Window(kernel[i], stride[i], 1, padding[i]) for i in used)
    op: TileOp = AvgPool(windows, axes, x.space.extent, count_padding, divisor, tuple(padding[i] for i in used))
    if len(used) != count:
        op = Squeezed(op, count, used)  # type: ignore[arg-type]
    return rec.emit(op, [x], outs, windowed_at(x, used, count, outs[0].shape), name_of(func))
