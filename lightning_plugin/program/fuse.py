"""BatchNorm run whole: one call of PyTorch's own kernel where a tiled run needs a statistic and its application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.rules.norm import Normalize, channels_last, pulled_back_in_order
from lightning_plugin.rules.reductions import VarMean

if TYPE_CHECKING:
    from lightning_plugin.graph import Node, Value


def pairs(nodes: Sequence[Node], among: Sequence[Node]) -> dict[int, Node]:
    """The statistics nodes among ``nodes`` that only one normalisation, also among them, uses.

    By the serial number of either node; ``among`` are all nodes of the run, which tell who else reads a statistic.
    """
    readers: dict[Value, list[Node]] = {}
    for n in among:
        for v in n.vectors:
            readers.setdefault(v, []).append(n)
    here = {n.serial for n in nodes}
    found: dict[int, Node] = {}
    for n in nodes:
        if not isinstance(n.op, VarMean) or n.op.correction:
            continue
        users = {u.serial: u for v in n.outputs for u in readers.get(v, ())}
        if len(users) != 1:
            continue
        (user,) = users.values()
        if isinstance(user.op, Normalize) and not user.op.fold and user.serial in here and is_batch_norm(n, user):
            found[n.serial] = user
            found[user.serial] = n
    return found


def is_batch_norm(statistics: Node, user: Node) -> bool:
    x = statistics.maps[0]
    variance, mean = statistics.outputs
    return (
        user.maps == (x,)
        and user.vectors[:2] == (mean, variance)
        and statistics.op.dims == tuple(d for d in range(len(x.shape)) if d != 1)  # type: ignore[attr-defined]
    )


def batch_norm(statistics: Node, user: Node, x: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(result, variance, mean); ``vectors`` are the weight and bias that the normalisation has."""
    op, size = user.op, statistics.op.size  # type: ignore[attr-defined]
    assert isinstance(op, Normalize)
    rest = list(vectors)
    weight = rest.pop(0) if op.weight else None
    bias = rest.pop(0) if op.bias else None
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    # With a momentum of one, running statistics are this batch's own.
    mean = torch.zeros(x.shape[1], dtype=accumulation_dtype(x.dtype), device=x.device)
    unbiased = torch.zeros_like(mean)
    # Kernels want all vectors in one type, the statistics'; a module in half precision has its weight in half.
    weight, bias = (None if v is None else v.to(mean.dtype) for v in (weight, bias))
    out = torch.batch_norm(x, weight, bias, mean, unbiased, True, 1.0, op.eps, torch.backends.cudnn.enabled)
    out = pulled_back_in_order(out, channels_last(x))
    return out, unbiased * ((size - 1) / size), mean
