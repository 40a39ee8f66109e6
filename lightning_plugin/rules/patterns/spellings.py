"""Operators that are another's: said again in operators that have rules, so that they are tiled too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.private import argument_names, decomposition_table
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


@ATEN.rule(
    aten.aminmax.default, aten.channel_shuffle.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList,
    aten.isneginf.default, aten.isposinf.default, aten.linalg_cross.default, aten.nansum.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.rot90.default, aten.tril.default, aten.triu.default,
)  # fmt: skip
def decomposed(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """PyTorch's own decomposition, of operators of which it has the operator's derivative everywhere.

    Others have not: that of a norm gives NaN at zero, since PyTorch decomposes behind autograd.
    """
    return rec.decompose(decomposition_table[func], *args, **kwargs)


@ATEN.rule(aten.linalg_vector_norm.default)
def other_norms(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The norms of order infinity, minus infinity and zero."""
    order = float((dict(zip(argument_names(func), args, strict=False)) | kwargs).get("ord", 2))
    return decomposed(rec, func, args, kwargs, outs) if math.isinf(order) or order == 0 else NotImplemented


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
