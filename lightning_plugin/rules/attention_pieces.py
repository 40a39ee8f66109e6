"""Attention whose keys and values are read piece by piece.

    l = log Σ exp(s),   out = Σ exp(s − l) @ v,   s = q @ kᵀ · scale + mask

[Note: pieces] A tile of queries needs all keys and values of their images. If these do not fit beside it, each tile of
queries reads them from their tier piece by piece. Forward reads them once and keeps the largest score so far and sums
relative to it. Backward reads them again, with l and the result as constants. With δ = Σ g·out, the derivative of
Σ exp(s − l) (g·v − δ) is the piece's part of the gradients. The gradient of a piece of keys or values is added on their
tier, and is not held whole either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import Pieces, accumulation_dtype
from lightning_plugin.private import first_order
from lightning_plugin.rules.noise import Stream


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of a tile of queries."""

    p: float
    stream: Stream
    key: Tensor
    scores: Layout
    box: Box

    def apply_to(self, weights: Tensor, first: int, last: int) -> Tensor:
        """Drop weights of the keys ``[first, last)``."""
        keys = len(self.scores.dims) - 1
        axis = len(self.scores.extent)
        count = self.scores.shape[keys]
        layout = Layout((*self.scores.dims[:keys], (Axis(axis),)), (*self.scores.extent, count))
        box = Box((*self.box.lo, first), (*self.box.hi, last))
        kept = self.stream.keep(self.key, self.p, layout, box)
        return weights * kept * (1 / (1 - self.p) if self.p < 1 else 0.0)


@dataclass(frozen=True)
class Scores:
    """Function that computes attention scores of a tile of queries.

    Attributes:
        scale: As in PyTorch.
        row: Index of the tile's first query, if attention is causal.
        dropout: Dropout of the weights.
        dtype: Type to which autocast casts queries, keys and values.
        masked_to_zero: Queries without a visible key get zeros, as by PyTorch's function; else NaN, as by hand.
    """

    scale: float | None
    row: int | None
    dropout: WeightDropout | None
    dtype: torch.dtype | None
    masked_to_zero: bool = True

    def __call__(self, query: Tensor, key: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """Return the scores of a piece of keys, whose first one has index ``first``."""
        query, key = self.cast(query), self.cast(key)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        last = first + key.shape[-2]
        scores = (query * scale) @ repeat_heads(key, query).transpose(-2, -1)
        if mask is not None:
            part = mask[..., first:last] if mask.shape[-1] > 1 else mask
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if self.row is not None:
            rows = torch.arange(self.row, self.row + scores.shape[-2], device=scores.device)
            scores = scores.masked_fill(torch.arange(first, last, device=scores.device) > rows[:, None], -torch.inf)
        return scores

    def cast(self, operand: Tensor) -> Tensor:
        """Round an operand to autocast's type, and cast it to the type of sums."""
        operand = operand if self.dtype is None else operand.to(self.dtype)
        return operand.to(accumulation_dtype(operand.dtype))

    def weigh(self, weights: Tensor, value: Tensor, first: int) -> Tensor:
        """Return the weighted sum of a piece of values."""
        if self.dropout is not None:
            weights = self.dropout.apply_to(weights, first, first + value.shape[-2])
        return weights @ repeat_heads(self.cast(value), weights)


def repeat_heads(operand: Tensor, other: Tensor) -> Tensor:
    """Repeat heads of keys or values for the heads of queries that share them."""
    if operand.dim() < 3 or operand.shape[-3] in (1, other.shape[-3]):
        return operand
    return operand.repeat_interleave(other.shape[-3] // operand.shape[-3], -3)


def attend(scores: Scores, query: Tensor, mask: Tensor | None, key: Pieces, value: Pieces) -> Tensor:
    """Compute attention of a tile of queries to keys and values in pieces."""
    found: Tensor = Attend.apply(scores, key, value, query, mask, key.token, value.token)
    return found


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Scores, key: Pieces, value: Pieces, query: Tensor, mask: Tensor | None, *tokens: Tensor
    ) -> Tensor:
        most = weights = found = torch.zeros(0)
        for i, (first, _) in enumerate(key.intervals):
            s, v = scores(query, key.read(i), mask, first), value.read(i)
            now = s.amax(-1, keepdim=True)
            now = torch.maximum(most, now) if i else now
            shift = now.masked_fill(now.isneginf(), 0.0)  # queries without a visible key so far
            p = (s - shift).exp_()
            del s
            total, share = p.sum(-1, keepdim=True), scores.weigh(p, v, first)
            if i:
                shrink = (most - shift).exp_()
                total, share = total + weights * shrink, share + found * shrink
            most, weights, found = now, total, share
            del p, v
        blind = (weights == 0) & scores.masked_to_zero
        out = found / weights.masked_fill(blind, 1.0)
        ctx.scores, ctx.key, ctx.value = scores, key, value
        log = (most + weights.log()).masked_fill(blind, 0.0)
        ctx.save_for_backward(query, mask, out, log)
        return out.to(scores.dtype or query.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, mask, out, log = ctx.saved_tensors
        scores, key, value = ctx.scores, ctx.key, ctx.value
        grad = grad.to(out.dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        query = query.detach().requires_grad_(ctx.needs_input_grad[3])
        mask = None if mask is None else mask.detach().requires_grad_(ctx.needs_input_grad[4])
        found: dict[int, Tensor] = {}
        for i, (first, _) in enumerate(key.intervals):
            k = key.read(i).requires_grad_(key.add_gradient is not None)
            v = value.read(i).requires_grad_(value.add_gradient is not None)
            with torch.enable_grad():
                p = (scores(query, k, mask, first) - log).exp()
                pulled = (scores.weigh(p, v, first) * grad).sum() - (p * delta).sum()
            wanted = [t for t in (query, mask, k, v) if t is not None and t.requires_grad]
            made = dict(zip(map(id, wanted), torch.autograd.grad(pulled, wanted), strict=True))
            del p, pulled, wanted
            for pieces, t in ((key, k), (value, v)):
                if pieces.add_gradient is not None:
                    pieces.add_gradient(i, made.pop(id(t)))
            for place, t in ((3, query), (4, mask)):
                if t is not None and t.requires_grad:
                    share = made.pop(id(t)).to(out.dtype)
                    found[place] = share if place not in found else found[place].add_(share)
        gradients = [found[i].to(t.dtype) if t is not None and i in found else None for i, t in ((3, query), (4, mask))]
        return None, None, None, *gradients, None, None
