"""Parts of space: crops, strided slices, single rows, and splits into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.rules.channels import dim_of
from lightning_plugin.rules.indexmap import cropped, remap
from lightning_plugin.rules.table import ATEN, Recorder, filled
from lightning_plugin.rules.views import Reshape

aten = torch.ops.aten


def declined(value: Value | None) -> Any:
    return NotImplemented if value is None else value


@ATEN.rule(aten.slice.Tensor)
def slice_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, start, end, step = filled(args, None, 0, None, None, 1)
    dim %= len(x.shape)
    first, stop, step = slice(start, end, step).indices(x.shape[dim])
    return declined(remap(rec, x, {dim: cropped(first, len(range(first, stop, step)), step)}, "slice"))


@ATEN.rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def split_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim = args[0], dim_of(args, kwargs, 2) % len(args[0].shape)
    pieces, start = [], 0
    for out in outs:
        size = out.shape[dim]
        piece = remap(rec, x, {dim: cropped(start, size)}, "split")
        if piece is None:
            return NotImplemented
        pieces.append(piece)
        start += size
    return tuple(pieces)


@ATEN.rule(aten.select.int)
def select_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    return declined(row(rec, args[0], args[1], args[2], outs[0]))


@ATEN.rule(aten.unbind.int)
def unbind_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    rows = [row(rec, args[0], dim_of(args, kwargs, 1), i, out) for i, out in enumerate(outs)]
    return NotImplemented if any(r is None for r in rows) else tuple(rows)


def row(rec: Recorder, x: Value, dim: int, index: int, out: Tensor) -> Value | None:
    """One position along ``dim``, which then is gone; a flattened dimension is made into its axes first."""
    dim %= len(x.shape)
    index %= x.shape[dim]
    factors = x.space.dims[dim]
    if any(not isinstance(f, Axis) for f in factors):
        return None
    spread = Layout((*x.space.dims[:dim], *((f,) for f in factors), *x.space.dims[dim + 1 :]), x.space.extent)
    if len(factors) > 1:
        x = rec.emit(Reshape(spread), [x], [rec.fake(spread.shape, x.dtype, x.device)], spread, "view")[0]
    maps = {}
    for d in reversed(range(dim, dim + len(factors))):
        index, at = divmod(index, x.shape[d])
        maps[d] = cropped(at, 1)
    one = remap(rec, x, maps, "select")
    layout = None if one is None else one.space.regroup(tuple(out.shape))
    if one is None or layout is None:
        return None
    found: Value = rec.emit(Reshape(layout), [one], [out], layout, "select")[0]
    return found if any(size > 1 for size in layout.extent) else rec.gather(found)
