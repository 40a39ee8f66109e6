"""Window operators: the base of convolutions and pooling.

A tile reads the part of its windows inside the map and pads the rest. So an interior tile is not padded, and a tile at
the border is padded on the side where the map ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box, Clip, Window, clip_interval
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Kernel, TileOp
from lightning_plugin.rules.channels import is_plain, over_last_dims, resized
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten

#: Kernel on a tile and vectors, which pads both sides of each window dimension.
SlideKernel = Callable[[Tensor, Sequence[Tensor], Sequence[int]], Tensor]


@dataclass(frozen=True)
class WindowOp(TileOp):
    """Operator that slides windows over the last dimensions of its map.

    Attributes:
        windows: Windows along axes.
        axes: The axis of each.
        extent: Extent of the input.
        plain: If windows slide over plain dimensions too: the window of each plain one, which a tile has whole and the
            kernel pads, and None for each axis.
    """

    kind: ClassVar[str] = "window"
    windows: tuple[Window, ...]
    axes: tuple[int, ...]
    extent: tuple[int, ...]
    plain: tuple[Window | None, ...] = ()

    @property
    def all_windows(self) -> tuple[Window, ...]:
        """Windows of all dimensions, plain ones included."""
        own = iter(self.windows)
        return tuple(next(own) if w is None else w for w in self.plain) if self.plain else self.windows

    def clips(self, box: Box) -> tuple[Clip, ...]:
        """Return the positions to read and to pad along each axis."""
        return tuple(
            Clip.at(*w.need(box.lo[a], box.hi[a]), self.extent[a]) for w, a in zip(self.windows, self.axes, strict=True)
        )

    def need(self, box: Box) -> tuple[Box, ...]:
        lo, hi = list(box.lo), list(box.hi)
        for w, a in zip(self.windows, self.axes):
            lo[a], hi[a] = clip_interval(*w.need(lo[a], hi[a]), self.extent[a])
        return (Box(tuple(lo), tuple(hi)),)

    def is_inside(self, box: Box) -> bool:
        """True if all windows of a box are inside the map, so that it needs no padding."""
        for w, a in zip(self.windows, self.axes):
            lo, hi = w.need(box.lo[a], box.hi[a])
            if lo < 0 or hi > self.extent[a]:
                return False
        return True

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Padding of the tile."""
        for w, a in zip(self.windows, self.axes, strict=True):
            if a == axis:
                clip = Clip.at(*w.need(lo, hi), self.extent[a])
                return clip.before, clip.after
        return None

    def tile_padding(self, box: Box) -> list[int]:
        """Return the padding of a tile in `torch.nn.functional.pad`'s order: last dimension first."""
        own = iter(reversed(self.clips(box)))
        clips = [next(own) if w is None else Clip(0, 0, 0, 0) for w in reversed(self.plain or [None] * len(self.axes))]
        return [n for clip in clips for n in (clip.before, clip.after)]

    def makes_padded_copy(self, box: Box) -> bool:
        """True if computing a box makes a padded copy of its input."""
        return not self.is_inside(box)


@dataclass(frozen=True)
class SlidingOp(WindowOp):
    """Window operator whose kernel can pad, equally on both sides; a tile that needs other padding is padded before."""

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return self.kernel_for(box)(tiles, vectors)

    def kernel_for(self, box: Box) -> Kernel:
        return self.kernel(box, partial(self.slide, box))

    def kernel(self, box: Box, slide: SlideKernel) -> Kernel:
        """Return ``slide`` as a kernel for a box, with padding before it if it cannot pad as necessary."""
        padding = self.kernel_padding(box)
        if padding is not None:
            return partial(run_slide, slide, self.all_padding(padding))
        return partial(self.run_padded, slide, self.tile_padding(box))

    def run_padded(
        self, slide: SlideKernel, pads: Sequence[int], tiles: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> Tensor:
        x = torch.constant_pad_nd(tiles[0], pads, self.padding_value(tiles[0]))
        return slide(x, vectors, self.all_padding([0] * len(self.windows)))

    def all_padding(self, padding: Sequence[int]) -> Sequence[int]:
        """Return the padding of all window dimensions, given that of axes."""
        own = iter(padding)
        return [next(own) if w is None else w.before for w in self.plain] if self.plain else padding

    def apply_whole(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
        padding = self.kernel_padding(box, whole=True)
        return None if padding is None else self.slide(box, tiles[0], vectors, self.all_padding(padding))

    @abstractmethod
    def slide(self, box: Box, x: Tensor, vectors: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
        """Run PyTorch's kernel on a tile, with this padding on both sides of each window dimension."""

    def padding_value(self, x: Tensor) -> float:
        """Return the value of padding."""
        return 0.0

    def on_split(self, windows: tuple[Window, ...], extent: tuple[int, ...], after: Sequence[int | None]) -> SlidingOp:
        """Return the operator on a split, as if that were a map; see [Note: split] in `split`.

        Args:
            windows: Windows on the split.
            extent: Extent of the split.
            after: Positions behind the split that windows reach along each axis; None for the last split.
        """
        return replace(self, windows=windows, extent=extent)

    def can_pad(self, window: Window, size: int, padding: int) -> bool:
        """True if the kernel can pad a dimension of ``size`` positions by ``padding``."""
        return True

    def kernel_padding(self, box: Box, whole: bool = False) -> list[int] | None:
        """Return the padding with which the kernel computes exactly a box; None if there is none.

        It pads both sides by what the first window needs. That is right if the last window needs as much, or if the
        excess is too small for one more window.

        Args:
            box: The box.
            whole: The input is the whole map, of which the box may need a part.
        """
        found = []
        for clip, w, a in zip(self.clips(box), self.windows, self.axes, strict=True):
            size = self.extent[a] if whole else clip.hi - clip.lo
            reach = size + 2 * clip.before - w.dilation * (w.kernel - 1) - 1
            count = box.hi[a] - box.lo[a]
            if clip.before < 0 or reach < 0 or reach // w.stride + 1 != count:
                return None
            if clip.before and not self.can_pad(w, size, clip.before):
                return None
            found.append(clip.before)
        return found

    def makes_padded_copy(self, box: Box) -> bool:
        return not self.is_inside(box) and self.kernel_padding(box) is None


def run_slide(slide: SlideKernel, padding: Sequence[int], tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Run a kernel that pads a tile."""
    return slide(tiles[0], vectors, padding)


def axes_of_all_last(value: Value, count: int) -> tuple[int, ...] | None:
    """Return the axes of the last ``count`` dimensions; None if one of these is not exactly one axis."""
    found = axes_of_last(value, count)
    return found[0] if found is not None and len(found[1]) == count else None


def per_dim(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Expand an argument that may be given once for all dimensions."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def axes_of_last(value: Value, count: int, plain: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the axes of the last ``count`` dimensions, and the indices of the dimensions that have one.

    None if a dimension has several factors, or has no axis and more than one position; with ``plain`` it may have more.
    """
    layout = value.space
    rank = len(layout.dims)
    found = {i: layout.axis_of(rank - count + i) for i in range(count)}
    used = tuple(i for i, axis in found.items() if axis is not None)
    others = [rank - count + i for i in range(count) if i not in used]
    if not used or any(layout.has_axis(d) or (value.shape[d] != 1 and not plain) for d in others):
        return None
    return tuple(axis for axis in found.values() if axis is not None), used


def with_window_sizes(value: Value, axes: Collection[int], shape: Sequence[int]) -> Layout:
    """Return the layout of a result of this shape that has the same axes in the same dimensions."""
    layout, extent = value.space, list(value.space.extent)
    for d, size in enumerate(shape):
        axis = layout.axis_of(d)
        if axis in axes:
            extent[axis] = size  # type: ignore[index]
    return resized(layout.with_extent(extent), shape)


def window_fields(
    value: Value, windows: Sequence[Window], shape: Sequence[int], plain: bool = False
) -> tuple[dict[str, Any], Layout] | None:
    """Return the fields of a `WindowOp` over the last dimensions and the layout of its result, or None."""
    found = axes_of_last(value, len(windows), plain)
    if found is None:
        return None
    axes, used = found
    others = () if len(used) == len(windows) else tuple(None if i in used else w for i, w in enumerate(windows))
    along = tuple(windows[i] for i in used)
    fields = {"windows": along, "axes": axes, "extent": value.space.extent, "plain": others}
    return fields, with_window_sizes(value, axes, shape)


# Windows as a dimension of their own ----------------------------------------------------------------------


@dataclass(frozen=True)
class Unfold(WindowOp):
    """`Tensor.unfold`: windows along ``dim``, whose positions become a new last dimension."""

    dim: int = 0

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        (window,) = self.windows
        return tiles[0].unfold(self.dim, window.kernel, window.stride)


@ATEN.rule(aten.unfold.default, kind="window")
def unfold(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, size, step = args
    dim %= len(x.shape)
    axis = x.space.axis_of(dim)
    if axis is None:
        return NotImplemented
    extent = list(x.space.extent)
    extent[axis] = outs[0].shape[dim]
    layout = Layout((*x.space.dims, (size,)), tuple(extent))
    op = Unfold((Window(size, step),), (axis,), x.space.extent, dim=dim)
    return rec.emit(op, [x], outs, layout, "unfold")


@over_last_dims(aten.im2col.default, kind="window")
def im2col(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """`F.unfold`: windows of images (N, C, H, W) as columns (N, C x kernel, H x W)."""
    x, *sides = args
    if axes_of_all_last(x, 2) is None or len(x.shape) != 4 or not is_plain(x, 1):
        return NotImplemented

    def columns(x: Tensor) -> Tensor:
        x = F.pad(x, [p for p in reversed(sides[2]) for _ in range(2)])
        for d, (kernel, dilation, _, stride) in enumerate(zip(*sides, strict=True), 2):
            x = x.unfold(d, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        return x.permute(0, 1, 4, 5, 2, 3).reshape(outs[0].shape)

    return rec.decompose(columns, x)
