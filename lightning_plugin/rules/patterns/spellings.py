"""Operators that are another's: said again in operators that have rules, so that they are tiled too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.private import argument_names, decomposition_table
from lightning_plugin.rules.channels import name_of, reduced
from lightning_plugin.rules.reductions import reduced_size, root
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
    aten.linalg_cross.default, aten.nansum.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
    aten.rot90.default, aten.tril.default, aten.triu.default,
)  # fmt: skip
def decomposed(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """PyTorch's own decomposition, of operators of which it has the operator's derivative everywhere.

    Others have not: that of a norm gives NaN at zero, since PyTorch decomposes behind autograd.
    """
    return rec.decompose(decomposition_table[func], *args, **kwargs)


@ATEN.rule(aten.linalg_vector_norm.default)
def norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Norms of order infinity, minus infinity and zero; others are roots of sums of powers."""
    order = float((dict(zip(argument_names(func), args, strict=False)) | kwargs).get("ord", 2))
    if math.isinf(order) or order == 0:
        return decomposed(rec, func, args, kwargs, outs)
    dims, keep = reduced(func, args, kwargs)

    def powers(x: Tensor) -> Tensor:
        x = x.to(accumulation_dtype(outs[0].dtype))
        power = x.square() if order == 2 else x.abs().pow(order)
        return root(power.sum(dims, keepdim=keep), order, outs[0].dtype)

    return rec.decompose(powers, args[0]) if order > 0 else NotImplemented


@ATEN.rule(aten.var_mean.correction, aten.std_mean.correction)
def with_mean(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Of two results, each by itself."""
    spread = aten.var.correction if name_of(func) == "var_mean" else aten.std.correction
    dims, keep = reduced(func, args, kwargs)
    return rec.decompose(lambda x: (spread(x, *args[1:], **kwargs), x.mean(dims, keep)), args[0])


@ATEN.rule(aten.any.dim, aten.any.dims, aten.any.default, aten.all.dim, aten.all.dims, aten.all.default)
def truth(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Compare the number of true elements with none and with all."""
    dims, keep = reduced(func, args, kwargs)
    least = 1 if name_of(func) == "any" else reduced_size(args[0], dims)
    return rec.decompose(lambda x: (x.ne(0).sum(dims, keep) >= least).to(outs[0].dtype), args[0])
