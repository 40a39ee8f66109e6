"""Operators that slide over plain dimensions, on maps whose axes lie in dimensions that they carry.

A convolution looks at channels and at windows of space; to the dimensions before, it is indifferent: images of a batch,
patches of an image, windows of attention. Where what an operator looks at is plain, whatever it carries may be made of
axes, and each tile is computed as the whole is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.private import argument_names
from lightning_plugin.rules.channels import name_of, plain
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


def last(count: int) -> Callable[[Any], int]:
    """So many of the last dimensions are looked at."""
    return lambda args: count


def all_but_first(args: Any) -> int:
    return len(args[0].shape) - 1


#: Number of last dimensions of its first argument that an operator looks at; it carries those before.
LOOKS_AT: dict[Any, Callable[[Any], int]] = {
    aten.convolution.default: all_but_first,
    aten.im2col.default: all_but_first,
    aten.col2im.default: all_but_first,
    aten.native_group_norm.default: all_but_first,
    aten.max_pool1d.default: last(1),
    aten.max_pool2d_with_indices.default: last(2),
    aten.max_pool3d_with_indices.default: last(3),
    aten.avg_pool1d.default: last(1),
    aten.avg_pool2d.default: last(2),
    aten.avg_pool3d.default: last(3),
    aten._adaptive_avg_pool2d.default: last(2),
    aten._adaptive_avg_pool3d.default: last(3),
    aten.adaptive_max_pool2d.default: last(2),
    aten.adaptive_max_pool3d.default: last(3),
    aten.reflection_pad1d.default: last(1),
    aten.reflection_pad2d.default: last(2),
    aten.reflection_pad3d.default: last(3),
    aten.replication_pad1d.default: last(1),
    aten.replication_pad2d.default: last(2),
    aten.replication_pad3d.default: last(3),
    aten.upsample_nearest1d.default: last(1),
    aten.upsample_nearest2d.default: last(2),
    aten.upsample_nearest3d.default: last(3),
    aten._upsample_nearest_exact1d.default: last(1),
    aten._upsample_nearest_exact2d.default: last(2),
    aten._upsample_nearest_exact3d.default: last(3),
    aten.upsample_linear1d.default: last(1),
    aten.upsample_bilinear2d.default: last(2),
    aten.upsample_trilinear3d.default: last(3),
    aten.upsample_bicubic2d.default: last(2),
    aten._upsample_bilinear2d_aa.default: last(2),
    aten._upsample_bicubic2d_aa.default: last(2),
}


@dataclass(frozen=True)
class Result:
    """One of several results of an operator."""

    func: Any
    place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.func(*args, **kwargs)[self.place]
        return found


@ATEN.rule(*LOOKS_AT, kind="local where space is plain")
def carried(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """A node for each result; of several, one that nobody uses costs nothing."""
    x, others = args[0], [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Value)]
    looks = LOOKS_AT[func](args)
    rank = len(x.shape)
    if not x.is_map or any(v.is_map for v in others) or all(size == 1 for size in x.space.extent):
        return NotImplemented
    if not all(plain(x, d) for d in range(rank - looks, rank)):
        return NotImplemented
    if func is aten.native_group_norm.default:
        return group_norm(rec, func, args, outs)
    made = []
    for i, out in enumerate(outs):
        layout = looked_at(x.space, looks, out.shape)
        one = func if len(outs) == 1 else Result(func, i)
        made.append(local(rec, one, args, kwargs, out, layout, name=name_of(func)))
    return tuple(made)


def looked_at(layout: Layout, looks: int, shape: Sequence[int]) -> Layout:
    """The layout of a result: what was carried, then plain dimensions."""
    lead = len(layout.dims) - looks
    return Layout((*layout.dims[:lead], *((size,) for size in shape[lead:])), layout.extent)


def group_norm(rec: Recorder, func: Any, args: Any, outs: Sequence[Tensor]) -> Any:
    """Its arguments say how large the batch is, which of a tile is another number."""
    x, weight, bias = args[:3]
    groups, eps = args[6], args[7]
    assert argument_names(func)[6] == "group"
    layouts = [x.space, *(Layout((x.space.dims[0], (out.shape[1],)), x.space.extent) for out in outs[1:])]
    return tuple(
        local(rec, GroupNorm(groups, eps, i), [x, weight, bias], {}, out, layout, name="group_norm")
        for i, (out, layout) in enumerate(zip(outs, layouts, strict=True))
    )


@dataclass(frozen=True)
class GroupNorm:
    """One of the results of a group normalisation: the map, its means, its standard deviations' inverses."""

    groups: int
    eps: float
    place: int

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        inner = math.prod(x.shape[2:])
        found: Tensor = aten.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], inner, self.groups, self.eps)[
            self.place
        ]
        return found
