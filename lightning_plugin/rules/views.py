"""Changes of shape: a view regroups the factors of a layout, a permutation reorders its dimensions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.ops import TileOp
from lightning_plugin.rules.blocks import cut, joined
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@dataclass(frozen=True)
class Reshape(TileOp):
    """The same positions in another shape."""

    kind: ClassVar[str] = "layout"
    uniform: ClassVar[bool] = True
    layout: Layout

    def need(self, box: Box) -> tuple[Box, ...]:
        return (box,)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return None

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].reshape(self.layout.tile_shape(box))


@dataclass(frozen=True)
class Expand(Reshape):
    """Plain dimensions repeated."""

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].expand(self.layout.tile_shape(box))


@ATEN.rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze,
    aten.flatten, aten.unflatten, aten._reshape_alias.default,
)  # fmt: skip
def view(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    layout = x.space.regroup(tuple(outs[0].shape))
    if layout is None:
        found = cut(x.space, tuple(outs[0].shape))
        return NotImplemented if found is None else rec.emit(found, [x], outs, found.layout, name_of(func))
    return joined(rec, rec.emit(Reshape(layout), [x], outs, layout, name_of(func))[0])


@ATEN.rule(aten.permute.default, aten.transpose.int, aten.t.default)
def permute(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    rank = len(x.shape)
    order = list(range(rank))
    if func is aten.permute.default:
        order = [d % rank for d in args[1]]
    else:
        a, b = (args[1] % rank, args[2] % rank) if len(args) > 1 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return local(rec, aten.permute.default, [x, order], {}, outs[0], x.space.permute(order), name=name_of(func))


@ATEN.rule(aten.expand.default)
def expand(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    shape = tuple(outs[0].shape)
    offset = len(shape) - len(x.shape)
    if any(x.shape[d] != shape[d + offset] for d in x.space.space):
        return NotImplemented
    dims = [(size,) for size in shape[:offset]]
    dims += [dim if x.space.is_space(d) else (shape[d + offset],) for d, dim in enumerate(x.space.dims)]
    layout = Layout(tuple(dims), x.space.extent)
    return rec.emit(Expand(layout), [x], outs, layout, "expand")


@ATEN.rule(aten.as_strided.default, kind="layout")
def restrided(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The same elements in the same places: pooling says so of a result whose channels lie last in memory."""
    x, out = args[0], outs[0]
    offset = kwargs.get("storage_offset", args[3] if len(args) > 3 else None)
    strides = zip(x.shape, x.fake.stride(), out.stride(), strict=False)
    if tuple(out.shape) != x.shape or offset or any(size > 1 and a != b for size, a, b in strides):
        return NotImplemented
    return rec.emit(Reshape(x.space), [x], outs, x.space, "view")
