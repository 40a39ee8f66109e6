"""CHIEF, MADELEINE and Feather: slide encoders that are gated attention over patches.

Their parts have the names of the published files, which are loaded by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wsi_trainer.models.heads import Pooling, attended, lowered


class GatedScores(nn.Module):
    """c(tanh(a h) ⊙ sigmoid(b h)) of each position, whose entries lie last."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_a = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Dropout(dropout))
        self.attention_b = nn.Sequential(nn.Linear(width, hidden), nn.Sigmoid(), nn.Dropout(dropout))
        self.attention_c = nn.Linear(hidden, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention_c(self.attention_a(h) * self.attention_b(h))


def entries_last(features: Tensor) -> Tensor:
    """From (N, channels, h, w) to (N, h, w, channels), as linear layers take them."""
    return features.permute(0, 2, 3, 1)


def as_map(values: Tensor) -> Tensor:
    """From (N, h, w, channels) to (N, channels, h, w)."""
    return values.permute(0, 3, 1, 2)


class Chief(Pooling):
    """CHIEF: the features themselves, weighted by gated attention over a layer of them.

    The published model's part for the organ, and its classifiers of patches and slides, do not enter this vector.
    """

    def __init__(self, channels: int, width: int = 512, hidden: int = 256, dropout: float = 0.25) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a patch that attention sees.
            hidden: Rows of a and b.
            dropout: Dropout of these, while the head is trained.
        """
        super().__init__(channels)
        scores = GatedScores(width, hidden, dropout)
        self.attention_net = nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Dropout(dropout), scores)

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, 1, h, w)."""
        return lowered(as_map(self.attention_net(entries_last(features))), counts)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return attended(features, self.scores(features, counts))


class Feather(Pooling):
    """Feather of MIL-Lab: a layer of the features, weighted by gated attention over it."""

    def __init__(self, channels: int, width: int = 512, hidden: int = 384, dropout: float = 0.25) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of the vector.
            hidden: Rows of a and b.
            dropout: Dropout of these, while the head is trained.
        """
        super().__init__(channels)
        self.out_channels = width
        self.patch_embed = nn.Sequential(nn.Linear(channels, width), nn.ReLU())
        self.global_attn = GatedScores(width, hidden, dropout)

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, 1, h, w)."""
        return lowered(as_map(self.global_attn(self.patch_embed(entries_last(features)))), counts)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        h = self.patch_embed(entries_last(features))
        return attended(as_map(h), lowered(as_map(self.global_attn(h)), counts))


class Embedder(nn.Module):
    """Three layers over the entries of a patch, which give each head of attention its own."""

    def __init__(self, channels: int, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        sizes = (channels, width), (width, width), (width, heads * width)
        layers = [
            part
            for before, after in sizes
            for part in (nn.Linear(before, after), nn.LayerNorm(after), nn.GELU(), nn.Dropout(dropout))
        ]
        self.pre_attn = nn.Sequential(*layers)
        self.attn = nn.ModuleList(GatedScores(width, width, attention_dropout) for _ in range(heads))

    def forward(self, features: Tensor, counts: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """For each head the entries of positions and their logits of attention, as maps."""
        h = self.pre_attn(entries_last(features)).unflatten(-1, (-1, len(self.attn)))
        own = [h[..., number] for number in range(len(self.attn))]
        return [(as_map(part), lowered(as_map(attn(part)), counts)) for part, attn in zip(own, self.attn)]


class Madeleine(Pooling):
    """MADELEINE, of a slide of H&E: heads of gated attention, each over its own entries of a layer, and a layer of all.

    The entries of a head lie between those of the others, as in the published weights.
    """

    def __init__(
        self, channels: int, width: int = 512, heads: int = 4, dropout: float = 0.1, attention_dropout: float = 0.25
    ) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of the vector, and of a patch in a head.
            heads: How many.
            dropout: Dropout of the layers, while the head is trained.
            attention_dropout: Dropout inside attention.
        """
        super().__init__(channels)
        self.out_channels = width
        self.wsi_embedders = Embedder(channels, width, heads, dropout, attention_dropout)
        self.projector = nn.Linear(heads * width, width)

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, 1, h, w), of its mean over the heads."""
        logits = torch.cat([scores for _, scores in self.wsi_embedders(features, counts)], dim=1)
        shares = torch.softmax(logits.flatten(2), dim=-1).mean(dim=1, keepdim=True)
        return shares.clamp(min=torch.finfo(shares.dtype).tiny).log().unflatten(2, features.shape[2:])

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        vectors = [attended(part, scores) for part, scores in self.wsi_embedders(features, counts)]
        return self.projector(torch.stack(vectors, dim=-1).flatten(1))
