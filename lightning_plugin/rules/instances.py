"""Single images put side by side: patches that a loop cut out of one, say. That they are several is an axis."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import TileOp
from lightning_plugin.rules.channels import dim_of
from lightning_plugin.rules.patterns.patchwork import patchwork
from lightning_plugin.rules.rearrange import Concat
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@dataclass(frozen=True)
class Instance(TileOp):
    """A map as one image of several: an axis more, of one position, which is the first dimension."""

    kind: ClassVar[str] = "layout"
    uniform: ClassVar[bool] = True
    layout: Layout

    def need(self, box: Box) -> tuple[Box, ...]:
        return (Box(box.lo[:-1], box.hi[:-1]),)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return None

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].reshape(self.layout.tile_shape(box))


@ATEN.rule(aten.cat, aten.stack, kind="layout")
def side_by_side(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Maps of one image each, one after the other (``cat``), or maps that make up a new dimension (``stack``)."""
    values, new = list(args[0]), func is aten.stack.default
    first = values[0]
    if len(values) < 2 or dim_of(args, kwargs, 1) % len(outs[0].shape):
        return NotImplemented
    if all(v.is_map for v in values) and (patches := patchwork(rec, values, outs[0])) is not None:
        return patches
    if not (new or first.shape[0] == 1):
        return NotImplemented
    if not first.is_map or any(not v.is_map or v.space != first.space or v.dtype != outs[0].dtype for v in values):
        return NotImplemented
    extent = first.space.extent
    dims = first.space.tidy.dims[0 if new else 1 :]
    layout = Layout(((Axis(len(extent)),), *dims), (*extent, 1))
    if layout.shape != (1, *outs[0].shape[1:]):
        return NotImplemented
    fakes = [rec.fake(layout.shape, v.dtype, v.device) for v in values]
    pairs = zip(values, fakes, strict=True)
    images = [rec.emit(Instance(layout), [v], [fake], layout, "image")[0] for v, fake in pairs]
    rec.session.instances.add(len(extent))
    op = Concat(len(extent), 0, tuple(range(len(values) + 1)))
    return rec.emit(op, images, outs, layout.with_extent((*extent, len(values))), "cat")
