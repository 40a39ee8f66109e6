"""Windows laid out as a dimension of their own: `Tensor.unfold` and `torch.nn.functional.unfold`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box, Window
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.rules.channels import plain
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.window import WindowOp, axes_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Unfold(WindowOp):
    """Windows along one dimension, which stays; their positions become a new last one."""

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


@dataclass(frozen=True)
class Columns(WindowOp):
    """Windows of images (N, C, H, W) as columns (N, C x kernel, H x W)."""

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x, pads = tiles[0], self.pads(box)
        x = F.pad(x, pads) if any(pads) else x
        kernel, dilation, stride = zip(*((w.kernel, w.dilation, w.stride) for w in self.windows), strict=True)
        return F.unfold(x, kernel, dilation, 0, stride)


@ATEN.rule(aten.im2col.default, kind="window")
def im2col(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, kernel, dilation, padding, stride = args
    axes = axes_of(x, 2)
    if axes is None or len(x.shape) != 4 or not plain(x, 0) or not plain(x, 1):
        return NotImplemented
    windows = tuple(Window(k, s, d, p) for k, s, d, p in zip(kernel, stride, dilation, padding, strict=True))
    extent = list(x.space.extent)
    for w, p, a in zip(windows, padding, axes, strict=True):
        extent[a] = (extent[a] + 2 * p - w.dilation * (w.kernel - 1) - 1) // w.stride + 1
    layout = Layout(((x.shape[0],), (outs[0].shape[1],), tuple(Axis(a) for a in axes)), tuple(extent))
    return rec.emit(Columns(windows, axes, x.space.extent), [x], outs, layout, "im2col")
