"""Attention: queries that look at keys.

    softmax(q @ kᵀ · scale + mask) @ v

Within an instance it is local: what it carries (a batch, patches, windows, heads) may be made of axes. Over positions
it is tiled by queries: each tile holds its own queries and all keys and values of the images that it is about, whose
gradients are sums over tiles. Few queries that look at all positions pool these: a reduction.
"""

from __future__ import annotations

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
from lightning_plugin.ops import Autocast, Pieces, TileOp
from lightning_plugin.rules.channels import arguments
from lightning_plugin.rules.noise import Stream
from lightning_plugin.rules.pieces import Dropout, Scores, attend
from lightning_plugin.rules.pointwise import aligned, zeros
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under, flattened, uncut

aten = torch.ops.aten


@dataclass(frozen=True)
class Asked:
    """A call of attention."""

    query: Value
    key: Value
    value: Value
    mask: Value | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @staticmethod
    def of(given: dict[str, Any]) -> Asked:
        """The call with these arguments, whatever the operator calls them."""
        mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
        return Asked(
            given["query"], given["key"], given["value"], mask, given.get("dropout_p") or 0.0,
            bool(given.get("is_causal")), given.get("scale"), bool(given.get("enable_gqa")),
        )  # fmt: skip

    @property
    def plainly(self) -> bool:
        """True if nothing is asked for but keys and values."""
        return self.mask is None and not self.dropout and not self.causal and not self.grouped


@API.rule(F.scaled_dot_product_attention, kind="local, reduce or barrier")
def attention(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    a = Asked.of(dict(zip(names, args, strict=False)) | kwargs)
    if not a.query.is_map and a.key.is_map and a.value.is_map:
        return rec.decompose(pooled_attention, a.query, a.key, a.value, a.scale) if a.plainly else NotImplemented
    return attended(rec, a, outs[0], rec.autocast)


@ATEN.rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def fused_attention(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """The operators that `nn.MultiheadAttention` comes down to."""
    a = Asked.of(arguments(func, args, kwargs))
    rest = [zeros(rec, o, "unused") for o in outs[1:]]  # what only the fused kernel's own backward would read
    if a.query.is_map:
        found = attended(rec, a, outs[0], None)
        return NotImplemented if found is NotImplemented else (found, *rest)
    if not a.key.is_map or not a.value.is_map or not a.plainly:
        return NotImplemented
    found = rec.decompose(pooled_attention, a.query, a.key, a.value, a.scale)
    if found is NotImplemented:
        return NotImplemented
    if found[0].is_map:
        return found[0], *rest
    out = rec.vector(restrided, [found[0], list(outs[0].stride())], {}, [outs[0]], name="attention")[0]
    return out, *rest


def pooled_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax((query * scale) @ key.transpose(-2, -1), -1) @ value


def restrided(x: Tensor, strides: list[int]) -> Tensor:
    """In memory as the fused kernel leaves its result, which decides what the caller may do with ``view``."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def attended(rec: Recorder, a: Asked, out: Tensor, autocast: Any, by_hand: bool = False) -> Any:
    """Attention of queries that are a map: each tile's queries, all keys and values of what it is about; ``by_hand``:
    not by a fused kernel."""
    rank = len(a.query.shape)
    query = a.query
    if tokens := axes_under(query, [rank - 2]):
        query = flattened(rec, query, rank - 2) or uncut(rec, query, tokens)
    if not query.is_map or axes_under(query, [rank - 1]) or a.query.shape[-1] == 0:
        return NotImplemented
    lead = query.space.dims[: rank - 2]
    keys = a.key.shape[-2]
    scores = Layout((*lead, query.space.dims[rank - 2], (keys,)), query.space.extent)
    key = beside(rec, a.key, (*lead, (keys,), (a.key.shape[-1],)), query)
    value = beside(rec, a.value, (*lead, (keys,), (a.value.shape[-1],)), query)
    if key is None or value is None:
        return NotImplemented
    mask = a.mask
    if mask is not None:
        mask = aligned(rec, mask, scores)
        if mask is None:
            return NotImplemented
    layout = query.space.with_dim(rank - 1, (out.shape[-1],))
    if layout.shape != tuple(out.shape):
        return NotImplemented  # queries that are repeated for keys' sake
    token = query.space.axis_of(rank - 2)
    operands = [v for v in (query, key, value, mask) if v is not None]
    operands.sort(key=lambda v: not v.is_map)
    key_of_step, call = rec.session.random_key() if a.dropout else (0, 0)
    op = Attention(
        tuple(operands.index(v) for v in (query, key, value)), None if mask is None else operands.index(mask),
        tuple(v.space.extent for v in operands if v.is_map), a.scale, a.dropout, a.causal, a.grouped, token, scores,
        Stream(call, key_of_step), autocast, by_hand,
    )  # fmt: skip
    if a.grouped and not op.plain:
        return NotImplemented
    return rec.emit(op, operands, [out], layout, "attention")[0]


def beside(rec: Recorder, value: Value, dims: tuple[Any, ...], query: Value) -> Value | None:
    """Keys or values as tiles of queries need them: whole along their positions, and cut with the queries along what
    both carry; None where they carry different axes."""
    rank = len(value.shape)
    if axes_under(value, [rank - 1]) or rank != len(dims):
        return None
    value = uncut(rec, value, axes_under(value, [rank - 2]), entire=True)
    return aligned(rec, value, Layout(dims, query.space.extent))


@dataclass(frozen=True)
class Attention(TileOp):
    """Queries, all keys and values that they may look at, and what comes of it.

    ``roles`` are the places of query, key and value among what is read, maps first, and ``mask`` the mask's; ``token``
    is the axis of queries; ``by_hand`` says that no fused kernel computes it. It is *plain* where it does not depend on
    where its queries are, as a causal one does and one with dropout.
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
    autocast: Autocast | None
    by_hand: bool = False

    @property
    def plain(self) -> bool:
        return not self.dropout and (not self.causal or self.token is None)

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.plain

    @property
    def in_pieces(self) -> tuple[int, ...]:
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
            return attend(self.looking(box, query), query, mask, key, value)
        if self.by_hand:
            scores = query @ key.transpose(-2, -1) * self.scale
            return torch.softmax(scores if mask is None else scores + mask, -1) @ value
        if self.plain:
            with nullcontext() if self.autocast is None or self.autocast.idle else self.autocast.replay():
                return F.scaled_dot_product_attention(
                    query, key, value, mask, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
                )
        looking = self.looking(box, query)
        scores = looking(query, key, mask, 0)
        blind = scores.isneginf().all(-1, keepdim=True)  # a query that may look at nothing finds zeros
        weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        return looking.weigh(weights, value, 0).to(query.dtype)

    def looking(self, box: Box, query: Tensor) -> Scores:
        """Scores of the queries of a box."""
        first = None if not self.causal else 0 if self.token is None else box.lo[self.token]
        dropout = Dropout(self.dropout, self.stream, self.scores, box) if self.dropout else None
        cast = self.autocast is not None and self.autocast.enabled and query.dtype != torch.float64
        dtype = self.autocast.dtype if cast and self.autocast else None
        return Scores(self.scale, first, dropout, dtype, zeros=not self.by_hand)
