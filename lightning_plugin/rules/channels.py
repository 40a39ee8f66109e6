"""Local operators that act along a dimension that is not space: softmax over channels, concatenation, slicing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.private import argument_names, operator_name
from lightning_plugin.rules.pointwise import local, spread
from lightning_plugin.rules.table import API, ATEN, Recorder

aten = torch.ops.aten


def dim_of(args: Sequence[Any], kwargs: dict[str, Any], position: int, default: int = 0) -> int:
    return kwargs.get("dim", args[position] if len(args) > position else default)


def name_of(func: Any) -> str:
    return operator_name(func)


def plain(value: Value, dim: int) -> bool:
    """True of a dimension that has no axis of a map."""
    return not value.space.tidy.is_space(dim % len(value.shape))


def resized(layout: Layout, shape: Sequence[int]) -> Layout:
    """A layout with its plain dimensions set to a result's sizes."""
    before, tidy = layout.shape, layout.tidy
    return Layout(
        tuple(
            dim if tidy.is_space(d) or (layout.is_space(d) and before[d] == shape[d]) else (shape[d],)
            for d, dim in enumerate(layout.dims)
        ),
        layout.extent,
    )


@ATEN.rule(
    aten._softmax, aten._log_softmax, aten.glu, aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.sort,
    aten._safe_softmax, kind="local",
)  # fmt: skip
def along_channels(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    if len(outs) != 1 or not plain(x, dim_of(args, kwargs, 1, -1)):
        return NotImplemented
    return local(rec, func, args, kwargs, outs[0], resized(x.space, outs[0].shape), name=name_of(func))


def occupied(values: Sequence[Value]) -> list[Value]:
    """The values that have elements; PyTorch puts others in a row as well."""
    return [v for v in values if 0 not in v.shape]


@ATEN.rule(aten.cat, aten.concat, kind="local")
def cat(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    values, dim = occupied(args[0]), dim_of(args, kwargs, 1)
    first = next(v for v in values if v.is_map)
    dim %= len(outs[0].shape)
    if first.space.is_space(dim):
        return NotImplemented
    layout = resized(first.space, outs[0].shape)
    space = set(layout.space)
    values = [v if v.is_map else spread(rec, v, resized(first.space, v.shape), space) for v in values]
    if any(not v.is_map or resized(v.space, outs[0].shape).tidy != layout.tidy for v in values):
        return NotImplemented
    return local(rec, func, [values, dim], {}, outs[0], layout, name="cat")


@ATEN.rule(aten.stack, kind="local")
def stack(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    values, dim = list(args[0]), dim_of(args, kwargs, 1) % len(outs[0].shape)
    if any(not v.is_map or v.space != values[0].space for v in values):
        return NotImplemented
    dims = list(values[0].space.dims)
    dims.insert(dim, (len(values),))
    return local(rec, func, [values, dim], {}, outs[0], Layout(tuple(dims), values[0].space.extent), name="stack")


@ATEN.rule(aten.slice.Tensor, aten.narrow.default, aten.flip.default, aten.index_select.default, kind="local")
def slice_channels(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dim: Any = dim_of(args, kwargs, 1)
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    if not x.is_map or not all(plain(x, d) for d in dims):
        return NotImplemented
    return local(rec, func, args, kwargs, outs[0], resized(x.space, outs[0].shape), name=name_of(func))


@ATEN.rule(aten.select.int, kind="local")
def select(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index = args
    dim %= len(x.shape)
    if not plain(x, dim):
        return NotImplemented
    layout = Layout((*x.space.dims[:dim], *x.space.dims[dim + 1 :]), x.space.extent)
    return local(rec, func, [x, dim, index], {}, outs[0], layout, name="select")


REDUCTIONS = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default,
    aten.var.correction, aten.std.correction, aten.linalg_vector_norm.default, aten.prod.dim_int, aten.any.dim,
    aten.all.dim, aten.argmax.default, aten.argmin.default,
)  # fmt: skip


@ATEN.rule(*REDUCTIONS, kind="local")
def reduce_channels(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """A reduction over dimensions that are not space; the ones over space are in `reduce`."""
    x = args[0]
    dims, keep = reduced(func, args, kwargs)
    if not all(plain(x, d) for d in dims):
        return NotImplemented
    layout = Layout(
        tuple((1,) if d in dims else dim for d, dim in enumerate(x.space.dims) if keep or d not in dims), x.space.extent
    )
    return local(rec, func, args, kwargs, outs[0], layout, name=name_of(func))


def reduced(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], bool]:
    """(the dimensions that a reduction reduces, whether it keeps them)."""
    given = dict(zip(argument_names(func), args, strict=False)) | kwargs
    rank = len(args[0].shape)
    dims = given.get("dim")
    if dims is None or dims == []:
        dims = range(rank)
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(d % rank for d in listed), bool(given.get("keepdim", False))


@dataclass(frozen=True)
class Result:
    """One of several results of an operator."""

    func: Any
    place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.func(*args, **kwargs)[self.place]
        return found


@ATEN.rule(aten.max.dim, aten.min.dim, aten.topk.default, kind="local")
def max_channels(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Value and index along channels, as two nodes; the maximum over space is in `reduce`."""
    x = args[0]
    topk = func is aten.topk.default
    dim = dim_of(args, kwargs, 2 if topk else 1, -1) % len(x.shape)
    if not plain(x, dim):
        return NotImplemented
    keep = len(outs[0].shape) == len(x.shape)
    layout = Layout(
        tuple((outs[0].shape[d],) if d == dim else f for d, f in enumerate(x.space.dims) if keep or d != dim),
        x.space.extent,
    )
    return tuple(
        local(rec, Result(func, i), args, kwargs, out, layout, name=name_of(func)) for i, out in enumerate(outs)
    )


@API.rule(F.linear, kind="local")
def linear(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """A linear layer over channels-last maps: rows are positions, and nothing is flattened."""
    x = args[0]
    if not x.is_map or not plain(x, -1):
        return NotImplemented
    layout = x.space.with_dim(len(x.shape) - 1, (outs[0].shape[-1],))
    return local(rec, func, args, kwargs, outs[0], layout, name="linear", autocast=rec.autocast)
