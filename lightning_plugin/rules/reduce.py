"""Reductions over space as they are spelled: which operator of `reductions` each call is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis
from lightning_plugin.rules.channels import REDUCTIONS, dim_of, name_of, reduced_dims
from lightning_plugin.rules.reductions import (
    TIES,
    Extreme,
    First,
    LogSumExp,
    Norm,
    SpaceOp,
    Sum,
    VarMean,
    covers,
    reduced_size,
)
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@ATEN.rule(*REDUCTIONS)
def over_space(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    dims, keep = reduced_dims(func, args, kwargs)
    return reduced(rec, func, args, kwargs, outs, dims, keep)


def reduced(
    rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], dims: Sequence[int], keep: bool
) -> Any:
    if not covers(args[0], dims):
        return NotImplemented
    found = space_op(rec, func, args, kwargs, outs, dims, keep)
    if found is None:
        return NotImplemented
    op, fakes = found
    return rec.emit(op, [args[0]], fakes, None, name_of(func))[:1]


def space_op(
    rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], dims: Sequence[int], keep: bool
) -> tuple[SpaceOp, list[Tensor]] | None:
    """The operator that reduces ``dims``, and its results, of which the call's own is the first."""
    x, out, name = args[0], outs[0], name_of(func)
    requested = kwargs.get("dtype")
    if requested is not None and requested != x.dtype:
        return None
    base = (tuple(dims), keep, out.dtype, reduced_size(x, dims))
    if name in ("sum", "mean"):
        return Sum(*base, divisor=float(base[3]) if name == "mean" else 1.0), [out]
    if name in ("amax", "amin"):
        shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
        fakes = [out, rec.fake(shape, torch.int64, x.device), rec.fake([*shape, TIES], torch.int64, x.device)]
        return Extreme(*base, x.space, sign=1 if name == "amax" else -1), fakes
    if name == "logsumexp":
        return LogSumExp(*base), [out]
    if name in ("var", "std"):
        correction = kwargs.get("correction", args[2] if len(args) > 2 else 1)
        return VarMean(*base, correction=1 if correction is None else correction, root=name == "std"), [out, out]
    if name == "linalg_vector_norm":
        order = float(kwargs.get("ord", args[1] if len(args) > 1 else 2))
        return (Norm(*base, order=order), [out]) if 0 < order < math.inf else None
    return None


@ATEN.rule(aten.max.dim, aten.min.dim)
def extreme(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """max and min with indices along a dimension that holds all of space, and nothing else."""
    x = args[0]
    dim = dim_of(args, kwargs, 1, -1) % len(x.shape)
    if not covers(x, [dim]) or not row_major(x, [dim]):
        return NotImplemented
    keep = len(outs[0].shape) == len(x.shape)
    op = First((dim,), keep, x.dtype, x.shape[dim], x.space, sign=1 if name_of(func) == "max" else -1)
    return rec.emit(op, [x], outs, None, name_of(func))


def row_major(value: Value, dims: Sequence[int]) -> bool:
    """True if the given dimensions list exactly the axes of space, in order."""
    layout = value.space.tidy
    factors = [f for d in sorted(dims) for f in layout.dims[d] if f != 1]
    return factors == [Axis(i) for i, size in enumerate(layout.extent) if size > 1]


@ATEN.rule(
    aten.sum.default,
    aten.mean.default,
    aten.amax,
    aten.max.default,
    aten.min.default,
    aten.std.default,
    aten.var.default,
)
def reduce_all(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The reductions to one number."""
    name = {"max": "amax", "min": "amin"}.get(name_of(func), name_of(func))
    packet = getattr(aten, name)
    x = args[0]
    dims = list(range(len(x.shape)))
    named = packet.dim if name in ("mean",) else packet.dim_IntList if name == "sum" else None
    return reduced(rec, named or getattr(packet, "default", packet), args, kwargs, outs, dims, False)


@ATEN.rule(aten.var_mean.correction)
def var_mean(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [d % len(x.shape) for d in (dims or range(len(x.shape)))]
    if not covers(x, dims):
        return NotImplemented
    correction = kwargs.get("correction", 1)
    op = VarMean(
        tuple(dims), bool(kwargs.get("keepdim", False)), x.dtype, reduced_size(x, dims),
        correction=1 if correction is None else correction,
    )  # fmt: skip
    return rec.emit(op, [x], outs, None, "var_mean")


@ATEN.rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """To one position; other sizes are in `adaptive`."""
    x, size = args
    count = len(size)
    dims = tuple(range(len(x.shape) - count, len(x.shape)))
    if any(s != 1 for s in size) or not covers(x, dims) or not row_major(x, dims):
        return NotImplemented
    op = First(dims, True, x.dtype, reduced_size(x, dims), x.space)
    return rec.emit(op, [x], outs, None, name_of(func))
