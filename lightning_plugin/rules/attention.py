"""Attention.

    softmax(q @ kᵀ · scale + mask) @ v

If queries and keys have no axis (windows, patches), it is local: its other dimensions may have axes. If queries are
positions, it is tiled by queries: each tile has its queries and all keys and values of their images, whose gradients
are sums over tiles. If only keys are positions, it is a reduction that pools them.

Attention written by hand, as two products with a softmax between, is recorded as attention too if positions attend to
positions: keys and values are then stored once, and read piece by piece if they do not fit. Other operators that read
its scores or weights have them as written.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Autocast, Gather, Pieces, Slot, Spread, TileOp
from lightning_plugin.rules.attention_pieces import Scores, WeightDropout, attend
from lightning_plugin.rules.channels import arguments
from lightning_plugin.rules.noise import Stream
from lightning_plugin.rules.pointwise import Local, align, zeros
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.uncut import Uncut, axes_under, flatten_dim, uncut
from lightning_plugin.rules.views import Expand, Reshape

aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of attention."""

    query: Value
    key: Value
    value: Value
    mask: Value | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @staticmethod
    def of(given: dict[str, Any]) -> AttentionCall:
        """Read the arguments of any of PyTorch's attention operators, by name."""
        mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
        return AttentionCall(
            given["query"], given["key"], given["value"], mask, given.get("dropout_p") or 0.0,
            bool(given.get("is_causal")), given.get("scale"), bool(given.get("enable_gqa")),
        )  # fmt: skip

    @property
    def has_no_options(self) -> bool:
        """True if there are no mask, dropout, causality or shared heads."""
        return self.mask is None and not self.dropout and not self.causal and not self.grouped


@API.rule(F.scaled_dot_product_attention, kind="local, reduce or barrier")
def attention(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    a = AttentionCall.of(dict(zip(names, args, strict=False)) | kwargs)
    if not a.query.is_map and a.key.is_map and a.value.is_map:
        return rec.decompose(pooled_attention, a.query, a.key, a.value, a.scale) if a.has_no_options else NotImplemented
    return record_attention(rec, a, outs[0], rec.autocast)


@ATEN.rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def fused_attention(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The kernels that `nn.MultiheadAttention` calls."""
    a = AttentionCall.of(arguments(func, args, kwargs))
    rest = [zeros(rec, o, "unused") for o in outs[1:]]  # read by the fused kernel's backward only
    if a.query.is_map:
        found = record_attention(rec, a, outs[0], None)
        return NotImplemented if found is NotImplemented else (found, *rest)
    if not a.key.is_map or not a.value.is_map or not a.has_no_options:
        return NotImplemented
    found = rec.decompose(pooled_attention, a.query, a.key, a.value, a.scale)
    if found is NotImplemented:
        return NotImplemented
    if found[0].is_map:
        return found[0], *rest
    out = rec.vector(with_strides, [found[0], list(outs[0].stride())], {}, [outs[0]], name="attention")[0]
    return out, *rest


def pooled_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax((query * scale) @ key.transpose(-2, -1), -1) @ value


def with_strides(x: Tensor, strides: list[int]) -> Tensor:
    """Copy to the strides of the fused kernel's result, which the caller may take a ``view`` of."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def record_attention(rec: Recorder, a: AttentionCall, out: Tensor, autocast: Any, by_hand: bool = False) -> Any:
    """Record attention of queries that are a map, tiled by queries.

    Args:
        rec: The recorder.
        a: The arguments.
        out: The result.
        autocast: Autocast of the call.
        by_hand: The user's code computes it without a fused kernel.
    """
    rank = len(a.query.shape)
    query = a.query
    tokens = axes_under(query, [rank - 2])
    if tokens and (len(tokens) == 1 or a.mask is not None or a.dropout or a.causal):  # else rows and columns stay
        query = flatten_dim(rec, query, rank - 2) or uncut(rec, query, tokens)
    if not query.is_map or axes_under(query, [rank - 1]) or a.query.shape[-1] == 0:
        return NotImplemented
    lead = query.space.dims[: rank - 2]
    keys = a.key.shape[-2]
    scores = Layout((*lead, query.space.dims[rank - 2], (keys,)), query.space.extent)
    key = align_keys(rec, a.key, (*lead, (keys,), (a.key.shape[-1],)), query)
    value = align_keys(rec, a.value, (*lead, (keys,), (a.value.shape[-1],)), query)
    if key is None or value is None:
        return NotImplemented
    mask = a.mask
    if mask is not None:
        mask = align(rec, mask, scores)
        if mask is None:
            return NotImplemented
    layout = query.space.with_dim(rank - 1, (out.shape[-1],))
    if layout.shape != tuple(out.shape):
        return NotImplemented  # queries are broadcast to keys
    token = query.space.axis_of(rank - 2)
    operands = [v for v in (query, key, value, mask) if v is not None]
    operands.sort(key=lambda v: not v.is_map)
    random, call = None, 0
    if a.dropout:
        random, call = len(operands), rec.session.next_random_call()
        operands.append(rec.session.random_key(query.device))
    op = Attention(
        tuple(operands.index(v) for v in (query, key, value)), None if mask is None else operands.index(mask),
        tuple(v.space.extent for v in operands if v.is_map), a.scale, a.dropout, a.causal, a.grouped, token, scores,
        Stream(call), random, autocast, by_hand,
    )  # fmt: skip
    if a.grouped and not op.plain:
        return NotImplemented
    return rec.emit(op, operands, [out], layout, "attention")[0]


def align_keys(rec: Recorder, value: Value, dims: tuple[Any, ...], query: Value) -> Value | None:
    """Return keys or values for tiles of queries: uncut along their positions, with the axes of queries elsewhere.

    None if other axes differ from those of queries.
    """
    rank = len(value.shape)
    if axes_under(value, [rank - 1]) or rank != len(dims):
        return None
    value = uncut(rec, value, axes_under(value, [rank - 2]), entire=True)
    return align(rec, value, Layout(dims, query.space.extent))


@dataclass(frozen=True)
class Attention(TileOp):
    """Attention of a tile of queries to all keys and values of their images.

    Attributes:
        roles: Indices of query, key and value among the inputs, maps first.
        mask: Index of the mask among the inputs.
        extents: Extents of the maps.
        scale, dropout, causal, grouped: As in PyTorch.
        token: Axis of queries.
        scores: Layout of the scores.
        stream: Random numbers of dropout.
        random: Index of the step's key among the inputs.
        autocast: Autocast of the call.
        by_hand: The user's code computes it without a fused kernel.
    """

    kind: ClassVar[str] = "local"
    roles: tuple[int, ...]
    mask: int | None
    extents: tuple[tuple[int, ...], ...]
    scale: float | None
    dropout: float
    causal: bool
    grouped: bool
    token: int | None
    scores: Layout
    stream: Stream
    random: int | None
    autocast: Autocast | None
    by_hand: bool = False

    @property
    def plain(self) -> bool:
        """True if the result does not depend on the positions of queries."""
        return not self.dropout and (not self.causal or self.token is None)

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.plain

    @property
    def inputs_in_pieces(self) -> tuple[int, ...]:
        places = tuple(dict.fromkeys(self.roles[1:]))
        return places if all(i < len(self.extents) for i in places) and self.roles[0] not in places else ()

    def need(self, box: Box) -> tuple[Box, ...]:
        return tuple(box.broadcast(extent) for extent in self.extents)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return (lo, hi) if self.dropout or (self.causal and axis == self.token) else None

    def apply(self, box: Box, tiles: Sequence[Tensor | Pieces], vectors: Sequence[Tensor]) -> Tensor:
        operands: list[Any] = [*tiles, *vectors]
        query, key, value = (operands[i] for i in self.roles)
        mask = None if self.mask is None else operands[self.mask]
        if isinstance(key, Pieces):
            return attend(self.scores_of(box, query, operands), query, mask, key, value)
        if self.by_hand:
            scores = query @ key.transpose(-2, -1) * self.scale
            return torch.softmax(scores if mask is None else scores + mask, -1) @ value
        if self.plain:
            with nullcontext() if self.autocast is None or self.autocast.is_noop else self.autocast.replay():
                return F.scaled_dot_product_attention(
                    query, key, value, mask, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
                )
        scores_of = self.scores_of(box, query, operands)
        scores = scores_of(query, key, mask, 0)
        blind = scores.isneginf().all(-1, keepdim=True)  # queries without a visible key get zeros
        weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        return scores_of.weigh(weights, value, 0).to(query.dtype)

    def scores_of(self, box: Box, query: Tensor, operands: Sequence[Any]) -> Scores:
        """Return the function of the scores of a tile's queries."""
        first = None if not self.causal else 0 if self.token is None else box.lo[self.token]
        dropout = None
        if self.random is not None:
            dropout = WeightDropout(self.dropout, self.stream, operands[self.random], self.scores, box)
        cast = self.autocast is not None and self.autocast.enabled and query.dtype != torch.float64
        dtype = self.autocast.dtype if cast and self.autocast else None
        return Scores(self.scale, first, dropout, dtype, masked_to_zero=not self.by_hand)


# Written by hand ------------------------------------------------------------------------------------------

#: Factor of the scores by an operator with a number.
SCALES = {
    aten.mul.Tensor: lambda number: number,
    aten.mul.Scalar: lambda number: number,
    aten.div.Tensor: lambda number: 1 / number,
    aten.div.Scalar: lambda number: 1 / number,
}


def attention_by_hand(rec: Recorder, weights: Value, value: Value, out: Tensor) -> Any:
    """Record a product of weights ``(B, t, T)`` and values ``(B, T, d)`` as attention, if it is one."""
    if not weights.is_map or not value.is_map or len(weights.shape) != 3 or not axes_under(value, [1]):
        return NotImplemented
    softmax = before_views(weights)
    if called_function(softmax) is not aten._softmax.default or not is_over_last(softmax):
        return NotImplemented
    scores, scale, mask = softmax.node.inputs[0], 1.0, None  # type: ignore[union-attr]
    while (func := called_function(scores := before_views(scores))) not in (aten.bmm.default, aten.mm.default):
        node = scores.node
        if node is None or not isinstance(node.op, Local):
            return NotImplemented
        if func in SCALES and len(node.inputs) == 1 and isinstance(number := node.op.call.args[1], (int, float)):
            scale *= SCALES[func](number)
        elif func is aten.add.Tensor and mask is None and scale == 1.0 and (bias := added_vector(scores)) is not None:
            mask = bias
        else:
            return NotImplemented
        scores = node.inputs[0]
    query, keys = scores.node.inputs  # type: ignore[union-attr]
    turned = uncut_source(keys)
    if turned is None or not query.is_map or len(query.shape) != 3 or turned.dtype != out.dtype:
        return NotImplemented
    if mask is not None and (mask := flatten_mask(rec, mask, weights)) is None:
        return NotImplemented
    key = rec.decompose(lambda t: t.transpose(-2, -1), turned)
    if key is NotImplemented or weights.shape != (*query.shape[:2], turned.shape[-1]):
        return NotImplemented
    return record_attention(
        rec, AttentionCall(query, key[0], value, mask, 0.0, False, scale, False), out, None, by_hand=True
    )


def called_function(v: Value) -> Any:
    """Return the function that computes a map, if it is local."""
    return v.node.op.call.func if v.node is not None and isinstance(v.node.op, Local) else None


def before_views(v: Value) -> Value:
    """Return a map before views of the same elements."""
    while v.node is not None and isinstance(v.node.op, (Reshape, Expand)):
        source = v.node.inputs[0]
        if not source.is_map or math.prod(source.shape) != math.prod(v.shape):
            break
        v = source
    return v


def is_over_last(softmax: Value) -> bool:
    """True if a softmax is over the last dimension and keeps the type."""
    assert softmax.node is not None and isinstance(softmax.node.op, Local)
    _, dim, *rest = softmax.node.op.call.args
    return dim % len(softmax.shape) == len(softmax.shape) - 1 and not any(rest)


def added_vector(scores: Value) -> Value | None:
    """Return the vector that is added to scores, without a factor."""
    node = scores.node
    assert node is not None and isinstance(node.op, Local)
    if node.op.call.args != (Slot(0), Slot(1)) or node.op.call.kwargs or len(node.inputs) != 2:
        return None
    other = node.inputs[1]
    if other.node is not None and isinstance(other.node.op, Spread):
        other = other.node.inputs[0]
    return None if other.is_map else other


def uncut_source(keys: Value) -> Value | None:
    """Return the map that was uncut or gathered to keys."""
    node = keys.node
    return (
        node.inputs[0] if node is not None and isinstance(node.op, (Gather, Uncut)) and node.inputs[0].is_map else None
    )


def flatten_mask(rec: Recorder, mask: Value, weights: Value) -> Value | None:
    """Return a mask that is equal for all heads in the shape (t, T); None for other masks."""
    lead: Sequence[int] = mask.shape[:-2]
    if len(mask.shape) < 2 or math.prod(lead) != 1 or mask.shape[-2:] not in (weights.shape[1:], (1, weights.shape[2])):
        return None
    fake = rec.fake(mask.shape[-2:], mask.dtype, mask.device)
    return rec.vector(aten.reshape.default, [mask, list(mask.shape[-2:])], {}, [fake], name="view")[0]
