"""Softmax over positions.

    softmax(x) = exp(x - m) / s        m = max x,   s = Σ exp(x - m)

so a softmax over all positions is one reduction, to (s, m), and one broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.rules.axes import over
from lightning_plugin.rules.channels import name_of, plain
from lightning_plugin.rules.pointwise import broadcast, local
from lightning_plugin.rules.reductions import ExpSum, covers
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under

aten = torch.ops.aten


def apply_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.to(total.dtype) - top).exp() / total).to(dtype)


def apply_log_softmax(x: Tensor, total: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(total.dtype) - top - total.log()).to(dtype)


def left(x: Value, dim: int) -> set[int]:
    """The axes of a map that lie in other dimensions."""
    return axes_under(x, [d for d in range(len(x.shape)) if d != dim])


@ATEN.rule(aten._softmax, aten._log_softmax)
def softmax(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Over a dimension that holds all of space, of all images together or of each."""
    x, dim = args[0], args[1] % len(args[0].shape)
    apart = not covers(x, [dim])
    if apart and (plain(x, dim) or any(a not in rec.session.instances for a in left(x, dim))):
        return NotImplemented
    dtype = accumulation_dtype(outs[0].dtype)
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    sums = ExpSum((dim,), True, dtype, x.shape[dim])
    total, top = over(rec, sums, x, [rec.fake(shape, dtype, x.device) for _ in range(2)], "softmax sum")
    if apart:
        found = broadcast(rec, [x, total, top], x.shape)
        if found is None:
            return NotImplemented
        x, total, top = found[0]
    apply = apply_softmax if func is aten._softmax.default else apply_log_softmax
    return local(rec, apply, [x, total, top, outs[0].dtype], {}, outs[0], x.space, name=name_of(func))
