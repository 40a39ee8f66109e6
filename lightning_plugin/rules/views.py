"""Changes of shape: a view regroups the factors of a layout, a permutation reorders its dimensions.

A view of ``H`` as ``(H // 2, 2)`` gives an axis half as long, with a plain factor of 2 inside each position. A view of
``(H, 2)`` as one dimension gives an axis twice as long. Space-to-depth, window partitions and their inverses consist of
these two.
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
from lightning_plugin.ops import SeparableOp, TileOp
from lightning_plugin.private import operator_name
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import ATEN, Recorder, decomposed
from lightning_plugin.rules.uncut import flatten_dim

aten = torch.ops.aten


@dataclass(frozen=True)
class Reshape(TileOp):
    """Another shape of the same axes."""

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
    """Expansion of plain dimensions."""

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].expand(self.layout.tile_shape(box))


def reshape_map(rec: Recorder, x: Value, layout: Layout, name: str = "view") -> Value:
    """Record a map in another shape of the same axes."""
    return rec.emit(Reshape(layout), [x], [rec.fake(layout.shape, x.dtype, x.device)], layout, name)[0]


@dataclass(frozen=True, slots=True)
class Block:
    """Index arithmetic of an axis whose blocks of ``size`` positions become one position each."""

    size: int

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        return lo * self.size, hi * self.size

    def mark(self, lo: int, hi: int) -> Hashable:
        return None


@dataclass(frozen=True)
class Cut(SeparableOp):
    """View that makes blocks of positions of some axes plain factors."""

    kind: ClassVar[str] = "layout"
    uniform: ClassVar[bool] = True
    maps: tuple[Block, ...]
    layout: Layout

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        return tiles[0].reshape(self.layout.tile_shape(box))


def join_blocks(rec: Recorder, x: Value) -> Value:
    """Flatten each dimension of an axis and a plain factor to one axis."""
    for d, dim in enumerate(x.space.dims):
        match dim:
            case (Axis(index=axis), int(size)) if x.space.extent[axis] > 1 and size > 1:
                x = flatten_dim(rec, x, d) or x
    return x


@ATEN.rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze,
    aten.flatten, aten.unflatten, aten._reshape_alias.default,
)  # fmt: skip
def view(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    blocks: dict[int, int] = {}
    layout = x.space.regroup(tuple(outs[0].shape), blocks)
    if layout is None:
        return NotImplemented
    if blocks:
        return rec.emit(
            Cut(tuple(map(Block, blocks.values())), tuple(blocks), layout), [x], outs, layout, operator_name(func)
        )
    return join_blocks(rec, rec.emit(Reshape(layout), [x], outs, layout, operator_name(func))[0])


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
    return local(rec, aten.permute.default, [x, order], {}, outs[0], x.space.permute(order), name=operator_name(func))


@ATEN.rule(aten.as_strided.default, kind="layout")
def restrided(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Tiled if it changes nothing: PyTorch's pooling calls it on results with channels last."""
    x, out = args[0], outs[0]
    offset = kwargs.get("storage_offset", args[3] if len(args) > 3 else None)
    strides = zip(x.shape, x.fake.stride(), out.stride(), strict=False)
    if tuple(out.shape) != x.shape or offset or any(size > 1 and a != b for size, a, b in strides):
        return NotImplemented
    return rec.emit(Reshape(x.space), [x], outs, x.space, "view")


def real_parts(x: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs; conjugates that PyTorch has not computed yet are computed."""
    return torch.view_as_real(x.resolve_conj())


@ATEN.rule(aten.view_as_real.default)
def view_as_real(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    layout = Layout((*x.space.dims, (2,)), x.space.extent)
    return local(rec, real_parts, [x], {}, outs[0], layout, name="view_as_real")


@ATEN.rule(aten.view_as_complex.default)
def view_as_complex(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    if x.space.normalized.has_axis(len(x.shape) - 1):
        return NotImplemented
    layout = Layout(x.space.dims[:-1], x.space.extent)
    return local(rec, complex_numbers, [x], {}, outs[0], layout, name="view_as_complex")


def complex_numbers(x: Tensor) -> Tensor:
    """Return pairs as complex numbers; a tile's strides may not be those that a view needs."""
    return torch.complex(*x.unbind(-1))


ATEN.rule(
    aten.channel_shuffle.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.rot90.default,
    kind="views",
)(decomposed)  # fmt: skip
