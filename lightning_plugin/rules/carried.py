"""Operators that slide over plain dimensions, on maps whose axes lie in dimensions that they carry.

A convolution looks at channels and at windows of space; to the dimensions before, it is indifferent: images of a batch,
patches of an image, windows of attention. Where what an operator looks at is plain, whatever it carries may be made of
axes, and each tile is computed as the whole is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.rules.channels import Result, name_of, plain
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
} | {
    getattr(aten, name).default: last(int(re.findall(r"\d", name)[0]))
    for name in """
        max_pool1d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """.split()
}


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
