"""Softmax over positions.

    softmax(x) = exp(x - m) / s        m = max x,   s = Σ exp(x - m)

so a softmax over all positions is one reduction, to (s, m), and one broadcast. The maximum only keeps the
numbers in range; it cancels, and backward treats it as a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ops import ReduceOp, Reduction, accumulation_dtype
from lightning_plugin.rules.axes import along
from lightning_plugin.rules.channels import name_of, plain
from lightning_plugin.rules.pointwise import broadcast, local
from lightning_plugin.rules.reductions import SpaceOp, covers, widen
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under

aten = torch.ops.aten


# Softmax ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpSum(SpaceOp):
    """(Σ exp(x - m), m = max x), the reduced dimensions kept as ones."""

    uniform: ClassVar[bool] = True

    @property
    def blank(self) -> tuple[float, ...]:
        return 0.0, -math.inf

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = widen(tiles[0])
        top = x.amax(self.dims, keepdim=True)
        return Reduction(((x - finite(top)).exp_().sum(self.dims, keepdim=True).double(), top))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        (s, m), (t, n) = left.parts, right.parts
        top = torch.maximum(m, n)
        shift = finite(top)
        return Reduction((s * (m - shift).double().exp() + t * (n - shift).double().exp(), top))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts[0].to(self.dtype), total.parts[1].to(self.dtype)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (widen(tiles[0]) - finite(outputs[1])).exp().sum(self.dims, keepdim=True).to(self.dtype), None


def finite(top: Tensor) -> Tensor:
    """A maximum that can be subtracted: where everything is -inf there is nothing to keep in range."""
    return torch.where(top == -math.inf, 0.0, top)


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
    op: ReduceOp = along(sums, x) if apart else sums
    total, top = rec.emit(op, [x], [rec.fake(shape, dtype, x.device) for _ in range(2)], None, "softmax sum")
    if apart:
        found = broadcast(rec, [x, total, top], x.shape)
        if found is None:
            return NotImplemented
        x, total, top = found[0]
    apply = apply_softmax if func is aten._softmax.default else apply_log_softmax
    return local(rec, apply, [x, total, top, outs[0].dtype], {}, outs[0], x.space, name=name_of(func))
