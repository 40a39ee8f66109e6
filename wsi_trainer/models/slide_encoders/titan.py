"""TITAN: a transformer over the patches of a slide, whose attention falls with their distance in the grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import LazyImage
from lightning_plugin.capture.lazy import LazyTensor
from wsi_trainer.models.encoders import AttentionPooler
from wsi_trainer.models.heads import Pooling, _logits, as_tokens, needed, refuse_counts

NEAR = 1 / 64
"""Sides of a patch by which a corner may lie before its cell of the grid: programs round them to pixels."""


def grid_of(places: Tensor) -> tuple[Tensor, Tensor | None]:
    """The cells of the grid of patches that have one, (cells, 2), counted from the first column and row; and where two
    patches lie in one cell, the cell of each.
    """
    corners = places[0, :, :, 0].t().double()
    cells = torch.floor(corners - corners.amin(dim=0) + NEAR)
    single, owner = torch.unique(cells, dim=0, return_inverse=True)
    return (cells, None) if len(single) == len(cells) else (single, owner)


def summed(tokens: Tensor, owner: Tensor) -> Tensor:
    """From tokens of patches, (N, patches, width), to sums of those of each cell."""
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner)
    first = counts.cumsum(0) - counts
    sums = tokens[:, order[first]]
    for number in range(1, int(counts.max())):
        has = number < counts
        sums = sums + tokens[:, order[first + has * number]] * has.to(tokens.dtype)[:, None]
    return sums


def slopes_of(heads: int) -> list[float]:
    """ALiBi's slope of each head: powers of two, and for further heads every other one between them."""
    whole = 2 ** int(math.log2(heads))
    between = [2 ** (-4 * number / whole) for number in range(1, 2 * (heads - whole), 2)]
    return [2 ** (-8 * number / whole) for number in range(1, whole + 1)] + between


def alibi(cells: Tensor, heads: int, like: Tensor) -> Tensor:
    """Summands of the scores of attention, (1, heads, T, T): the distance of two patches, times minus the slope of the
    head. The class token, which is the first of T, lies nowhere and has 0.

    Args:
        cells: Cells of the grid.
        heads: Heads of the attention.
        like: A tensor of its type; where that is lazy, so are the rows, and no more of them exist than are read.
    """
    known = torch.cat([cells, torch.ones_like(cells[:, :1])], dim=1).to(like.dtype)  # the last is 0 for the class token
    known = functional.pad(known, (0, 0, 1, 0)).to(like.device)
    rows = LazyImage(known.t()[None, :, :, None]) if isinstance(like, LazyTensor) else known.t()[None, :, :, None]
    asked = as_tokens(rows)
    squares = ((asked[:, :, None, :2] - known[:, :2]) ** 2).sum(dim=-1)
    distances = squares.sqrt() * asked[:, :, None, 2] * known[:, 2]
    slopes = torch.tensor(slopes_of(heads), dtype=like.dtype, device=like.device)
    return -distances[:, None] * slopes[:, None, None]


class Attention(nn.Module):
    """Attention of all tokens to all, with what is added to its scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and two layers, each on normalised tokens and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    """A row of blocks, by the name that they have in the published file."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.modules_list = nn.ModuleList(Block(width, heads) for _ in range(depth))


class Titan(Pooling):
    """TITAN: a class token and patches attend to each other, and one query to all of them.

    Patches of one cell of the grid are added, as in the published model. Its vector is the one before the projection
    to the space of texts, of which neither that projection nor the pooler of captions is a part.
    """

    wants_places = True

    def __init__(self, channels: int, width: int = 768, depth: int = 6, heads: int = 12, pool_heads: int = 8) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            depth: How many blocks.
            heads: Heads of their attention.
            pool_heads: Heads of the query's.
        """
        super().__init__(channels)
        self.out_channels, self.heads = width, heads
        self.patch_embed = nn.Sequential(nn.Linear(channels, width), nn.GELU())
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, width))
        self.blocks = Blocks(width, depth, heads)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.attn_pool_contrastive = AttentionPooler(width, width, pool_heads)

    def forward(self, features: Tensor, counts: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        refuse_counts(self, counts)
        return self.attn_pool_contrastive(self._tokens(features, *grid_of(needed(self, places))))

    def scores(self, features: Tensor, counts: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The logit of attention of each patch, (N, 1, h, w): what the query gives its cell, as the mean over the
        heads.
        """
        refuse_counts(self, counts)
        cells, owner = grid_of(needed(self, places))
        pooler, tokens = self.attn_pool_contrastive, self._tokens(features, cells, owner)
        keys = pooler.ln_k(tokens)
        query = pooler.ln_q(pooler.query).expand(len(tokens), 1, -1)
        shares = pooler.attn(query, keys, keys)[1][:, 0, 1:]
        return _logits(shares if owner is None else shares[:, owner], features)

    def _tokens(self, features: Tensor, cells: Tensor, owner: Tensor | None) -> Tensor:
        """The class token and those of cells, as they are pooled."""
        tokens = as_tokens(features)
        if owner is not None:
            tokens = summed(tokens, owner)
        x = self.patch_embed(tokens)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        bias = alibi(cells, self.heads, features)
        for block in self.blocks.modules_list:
            x = block(x, bias)
        return self.norm(x)
