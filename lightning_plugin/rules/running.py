"""Running statistics: buffers that a norm in train mode moves, once, when the batch's statistics are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.rules.table import Recorder


def moved(running: Tensor, value: Tensor, momentum: float) -> None:
    """Move a running statistic towards a batch's."""
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def move(
    rec: Recorder,
    running: Value | None,
    values: Sequence[Value],
    momentum: float,
    new: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0],
) -> None:
    """Have a running statistic moved, where there is one, when the values that say where are known."""
    if running is None:
        return
    buffer = rec.session.tensor(running)

    def write(tensors: Sequence[Tensor]) -> None:
        moved(buffer, new(tensors), momentum)

    rec.update([running], values, write)


#: A norm in train mode that moves the statistics it is given first, of operands, all the way to the batch's.
Norm = Callable[..., Tensor]


def norm_of_vectors(
    rec: Recorder,
    norm: Norm,
    operands: Sequence[Any],
    running: Sequence[Value],
    momentum: float,
    out: Tensor,
    **how: Any,
) -> Value:
    """A norm on vectors alone is run as a whole, and would move its buffers when it runs: it is given statistics of
    its own to move, and the buffers move in the order of the user's code, as where others share them."""
    (channels,), dtype = running[0].shape, running[0].dtype
    fakes = [rec.fake([channels], dtype, out.device) for _ in running]
    given = [norm, channels, dtype, *operands]
    result, *found = rec.vector(with_statistics, given, {}, [out, *fakes], name="batch_norm", **how)
    for target, value in zip(running, found, strict=True):
        move(rec, target, [value], momentum)
    made: Value = result
    return made


def with_statistics(norm: Norm, channels: int, dtype: torch.dtype, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """A norm's result, and the statistics by which running ones move."""
    mean, var = torch.zeros(2, channels, dtype=dtype, device=x.device)
    return norm(mean, var, x, *rest), mean, var
