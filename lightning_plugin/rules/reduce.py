"""Reductions over space as they are spelled: which operator of `reductions` each call is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.rules.axes import over
from lightning_plugin.rules.channels import name_of, reduced
from lightning_plugin.rules.reductions import (
    TIES,
    ExpSum,
    Extreme,
    First,
    Sum,
    VarMean,
    log_of_sum,
    reduced_size,
    root,
)
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@ATEN.rule(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def total(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims, keep = reduced(func, args, kwargs)
    if kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented
    size = reduced_size(x, dims)
    op = Sum(dims, keep, outs[0].dtype, size, float(size) if name_of(func) == "mean" else 1.0)
    return over(rec, op, x, outs, name_of(func))


@ATEN.rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The value alone: positions that tie for it share its gradient."""
    x, name = args[0], name_of(func)
    dims, keep = reduced(func, args, kwargs)
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    fakes = [*outs, rec.fake(shape, torch.int64, x.device), rec.fake([*shape, TIES], torch.int64, x.device)]
    op = Extreme(dims, keep, x.dtype, reduced_size(x, dims), x.space, 1 if "max" in name else -1)
    found = over(rec, op, x, fakes, name)
    return found if found is NotImplemented else found[:1]


@ATEN.rule(aten.max.dim, aten.min.dim, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def first(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The value and where it is first; of an adaptive pooling to one position (others are in `adaptive`)."""
    x, name = args[0], name_of(func)
    dims, keep = reduced(func, args, kwargs)
    if name.startswith("adaptive"):
        dims, keep = tuple(range(len(x.shape) - len(args[1]), len(x.shape))), True
        if any(size != 1 for size in args[1]):
            return NotImplemented
    op = First(dims, keep, x.dtype, reduced_size(x, dims), x.space, -1 if name == "min" else 1)
    return over(rec, op, x, outs, name)


@ATEN.rule(aten.argmax.default, aten.argmin.default)
def first_index(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, name = args[0], name_of(func)
    dims, keep = reduced(func, args, kwargs)
    op = First(dims, keep, x.dtype, reduced_size(x, dims), x.space, 1 if name == "argmax" else -1)
    found = over(rec, op, x, [rec.fake(outs[0].shape, x.dtype, x.device), *outs], name, grad=False)
    return found if found is NotImplemented else found[1:]


@ATEN.rule(aten.logsumexp.default)
def logsumexp(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, out = args[0], outs[0]
    dims, _ = reduced(func, args, kwargs)
    dtype = accumulation_dtype(out.dtype)
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    op = ExpSum(dims, True, dtype, reduced_size(x, dims))
    found = over(rec, op, x, [rec.fake(shape, dtype, x.device) for _ in range(2)], "logsumexp")
    if found is NotImplemented:
        return NotImplemented
    return rec.vector(log_of_sum, [*found, list(out.shape), out.dtype], {}, outs, name="logsumexp")


@ATEN.rule(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def moments(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The variance and the mean, which costs nothing where nobody asked for it."""
    x, name = args[0], name_of(func)
    dims, keep = reduced(func, args, kwargs)
    correction = kwargs.get("correction")
    dtype = accumulation_dtype(x.dtype) if name == "std" else x.dtype
    op = VarMean(dims, keep, dtype, reduced_size(x, dims), 1 if correction is None else correction)
    found = over(rec, op, x, [rec.fake(outs[0].shape, dtype, x.device) for _ in range(2)], name)
    if name == "std" and found is not NotImplemented:
        return rec.vector(root, [found[0], 2, outs[0].dtype], {}, outs, name="sqrt")
    return found if found is NotImplemented else found[: len(outs)]
