"""GigaPath's slide encoder: LongNet over the patches of a slide, in the order in which they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.heads import Pooling, as_tokens, needed, refuse_counts
from wsi_trainer.models.slide_encoders.titan import NEAR

SEGMENTS = (1024, 5792, 32768, 185363, 1048576)
"""Tokens of a segment, for each of `RATIOS`: from 1024 to the patches of 256 pixels in a slide of 262,144, evenly in
their logarithm, as the published code makes them."""
RATIOS = (1, 2, 4, 8, 16)


def position_code(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of the row and the column of each patch, (1, patches, width): rows in the first half."""
    x, y = torch.floor(places[0, :, :, 0].double() + NEAR)
    steps = torch.arange(width // 4, dtype=torch.float64, device=places.device) / (width // 4)
    angles = [along[:, None] * 10000.0**-steps for along in (y, x)]
    return torch.cat([wave(part) for part in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


class Dilation:
    """Positions that take part in one branch of dilated attention.

    Tokens are filled up with zeros to whole segments, and a segment to a multiple of the ratio r; these zeros are
    attended to. The heads are r groups, and group g has the positions g, g + r, g + 2r, ... of each segment.
    """

    def __init__(self, tokens: int, segment: int, ratio: int) -> None:
        self.tokens, self.ratio = tokens, ratio
        self.segment = min(segment, tokens)
        self.added = -tokens % self.segment
        self.within = -self.segment % ratio

    def picked(self, x: Tensor) -> Tensor:
        """From (N, tokens, heads, d) to (N times segments, heads, positions of a head, d)."""
        r = self.ratio
        x = functional.pad(x, (0, 0, 0, 0, 0, self.added)).unflatten(1, (-1, self.segment))
        if r == 1:
            return x.flatten(0, 1).transpose(1, 2)
        x = functional.pad(x, (0, 0, 0, 0, 0, self.within)).unflatten(2, (-1, r)).unflatten(4, (r, -1))
        return (x * _own(r, x)[:, :, None, None]).sum(dim=3).flatten(3, 4).flatten(0, 1).transpose(1, 2)

    def spread(self, x: Tensor, absent: float) -> Tensor:
        """From what a branch has, (N times segments, heads, positions, d), to (N, tokens, heads, d), with another
        number where a head does not have the token.
        """
        x, r = x.transpose(1, 2).unflatten(0, (-1, (self.tokens + self.added) // self.segment)), self.ratio
        if r > 1:
            own = _own(r, x)[:, :, None, None]
            x = x.unflatten(3, (r, -1)).unsqueeze(3)
            x = (x * own + absent * (1 - own)).flatten(4, 5).flatten(2, 3)[:, :, : self.segment]
        return x.flatten(1, 2)[:, : self.tokens]


def _own(ratio: int, like: Tensor) -> Tensor:
    return torch.eye(ratio, dtype=like.dtype, device=like.device)


class DilatedAttention(nn.Module):
    """LongNet's attention: each branch by itself, and their mean weighted by the sums in their softmaxes.

    The weights are constants to the gradient, as in the published code.
    """

    def __init__(self, width: int, heads: int, segments: Sequence[int], ratios: Sequence[int]) -> None:
        super().__init__()
        self.heads, self.branches = heads, tuple(zip(segments, ratios, strict=True))
        self.k_proj, self.v_proj, self.q_proj = (nn.Linear(width, width) for _ in range(3))
        self.inner_attn_ln = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj))
        found, sums = [], []
        for segment, ratio in self.branches:
            dilation = Dilation(x.shape[1], segment, ratio)
            queries, keys, values = (dilation.picked(part) for part in (q, k, v))
            out = functional.scaled_dot_product_attention(queries, keys, values)
            found.append(dilation.spread(out, 0.0))
            with torch.no_grad():
                scores = queries @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5
                sums.append(dilation.spread(torch.logsumexp(scores, dim=-1, keepdim=True), -1e8))
        weights = torch.softmax(torch.cat(sums, dim=-1), dim=-1)
        mixed = sum(out * weights[..., number : number + 1] for number, out in enumerate(found))
        return self.out_proj(self.inner_attn_ln(mixed.flatten(2)))  # type: ignore[union-attr]


class FeedForward(nn.Module):
    """Two layers with GELU and a normalisation between."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.ffn_layernorm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.ffn_layernorm(functional.gelu(self.fc1(x)))))


class Layer(nn.Module):
    """Dilated attention and two layers, each on normalised tokens and added to them."""

    def __init__(self, width: int, heads: int, segments: Sequence[int], ratios: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.self_attn = DilatedAttention(width, heads, segments, ratios)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = FeedForward(width, 4 * width, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.self_attn_layer_norm(x)))
        return x + self.ffn(self.final_layer_norm(x))


class Encoder(nn.Module):
    """The layers, and a normalisation at their end."""

    def __init__(self, layers: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Projection(nn.Module):
    """A linear layer, by the name that it has in the published file."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class GigaPath(Pooling):
    """GigaPath's slide encoder: patches with a code of their places, and a class token, through LongNet.

    The vector is the normalised mean of the patches, as the published code is used by others, or the class token.
    Patches stand in the sequence in the order in which they come.
    """

    wants_places = True

    def __init__(
        self,
        channels: int,
        width: int = 768,
        depth: int = 12,
        heads: int = 16,
        segments: Sequence[int] = SEGMENTS,
        ratios: Sequence[int] = RATIOS,
        pool: Literal["mean", "class"] = "mean",
        dropout: float = 0.25,
    ) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            depth: How many layers.
            heads: Heads of their attention, a multiple of each ratio.
            segments: Tokens of a segment in each branch of the attention.
            ratios: For each branch every how many tokens a head sees.
            pool: The vector: the mean of the patches, or the class token.
            dropout: Dropout of the layers, while the head is trained.
        """
        super().__init__(channels)
        if width % 4 or width % heads or any(heads % ratio for ratio in ratios):
            raise ValueError(
                f"width is {width} and heads {heads}; width must be a multiple of 4 and of heads, and heads of each of "
                f"ratios, {', '.join(map(str, ratios))}"
            )
        if len(segments) != len(ratios):
            raise ValueError(f"segments are {len(segments)} and ratios {len(ratios)}; a branch has one of each")
        self.out_channels, self.pool = width, pool
        self.patch_embed = Projection(channels, width)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        layers = [Layer(width, heads, segments, ratios, dropout) for _ in range(depth)]
        self.encoder = Encoder(layers, width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.drop = nn.Dropout(dropout)
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear):
                own = any(end in name for end in ("v_proj", "out_proj", "fc1", "fc2"))
                nn.init.xavier_uniform_(part.weight, gain=math.sqrt(math.log(2 * depth)) if own and depth > 1 else 1.0)
                nn.init.zeros_(part.bias)

    def forward(self, features: Tensor, counts: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        refuse_counts(self, counts)
        x = self.patch_embed(as_tokens(features))
        x = x + position_code(needed(self, places), self.out_channels).to(x.device, x.dtype)
        x = self.drop(torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1))
        x = self.encoder(x)
        return self.norm(x[:, 0] if self.pool == "class" else x[:, 1:].mean(dim=1))
