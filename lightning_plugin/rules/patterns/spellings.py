"""Operators that are another's: said again in operators that have rules, so that they are tiled too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.private import decomposition_table
from lightning_plugin.rules.channels import arguments
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.window import each

aten = torch.ops.aten


@API.rule(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, kind="reduce")
def global_average(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """An average pooling whose one window is the map: a mean over space, which no tile has to see whole."""
    a = arguments(func, args, kwargs)
    x, count = a["input"], int(func.__name__[-2])
    sizes = x.shape[len(x.shape) - count :]
    padded = any(each(a["padding"], count)) or a.get("divisor_override") is not None
    if not x.is_map or padded or tuple(each(a["kernel_size"], count)) != tuple(sizes) or math.prod(sizes) == 1:
        return NotImplemented
    return rec.decompose(torch.mean, x, list(range(-count, 0)), keepdim=True)


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
