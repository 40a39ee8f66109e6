"""Operators that are another's: said again in operators that have rules, so that they are tiled too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.private import argument_names
from lightning_plugin.rules.axes import reduced
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.reductions import VarMean, covers, reduced_size
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.window import each

aten = torch.ops.aten


@API.rule(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, kind="reduce")
def global_average(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """An average pooling whose one window is the map: a mean over space, which no tile has to see whole."""
    names = (
        "input",
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    )
    a = dict(zip(names, args, strict=False)) | kwargs
    x, count = a["input"], int(func.__name__[-2])
    sizes = x.shape[len(x.shape) - count :]
    padded = any(each(a.get("padding", 0), count)) or a.get("divisor_override") is not None
    if not x.is_map or padded or tuple(each(a["kernel_size"], count)) != tuple(sizes) or math.prod(sizes) == 1:
        return NotImplemented
    return rec.decompose(torch.mean, x, list(range(-count, 0)), keepdim=True)


@ATEN.rule(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def in_another_type(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``x.mean(dim, dtype=...)``: cast, then reduce."""
    dtype = kwargs.get("dtype")
    if dtype is None or dtype == args[0].dtype:
        return NotImplemented
    rest = {k: v for k, v in kwargs.items() if k != "dtype"}
    return rec.decompose(lambda x: func(x.to(dtype), *args[1:], **rest), args[0])


@ATEN.rule(aten.linalg_vector_norm.default)
def other_norms(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The norms of order infinity, minus infinity and zero."""
    names = argument_names(func)
    order = float((dict(zip(names, args, strict=False)) | kwargs).get("ord", 2))
    dims, keep = reduced(func, args, kwargs)
    if math.isinf(order):
        return rec.decompose(lambda x: (torch.amax if order > 0 else torch.amin)(x.abs(), dims, keepdim=keep), args[0])
    if order == 0:
        return rec.decompose(lambda x: (x != 0).sum(dims, keepdim=keep).to(x.dtype), args[0])
    return NotImplemented


@ATEN.rule(aten.nansum.default)
def nansum(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    dims, keep = reduced(func, args, kwargs)
    return rec.decompose(lambda x: torch.where(x.isnan(), 0, x).sum(dims, keepdim=keep), args[0])


@ATEN.rule(aten.aminmax.default)
def aminmax(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    dims, keep = reduced(func, args, kwargs)
    return rec.decompose(lambda x: (x.amin(dims, keepdim=keep), x.amax(dims, keepdim=keep)), args[0])


@ATEN.rule(aten.std_mean.correction)
def std_mean(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims, keep = reduced(func, args, kwargs)
    if not covers(x, dims):
        return NotImplemented
    correction = kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    op = VarMean(dims, keep, x.dtype, reduced_size(x, dims), correction=correction, root=True)
    return rec.emit(op, [x], outs, None, name_of(func))
