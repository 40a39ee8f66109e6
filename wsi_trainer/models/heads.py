"""Heads: from the map of features of a whole slide to one vector for it.

Each head is built with the number of channels of the map: `AveragePooling(64)`. The vector it returns has
`out_channels` entries. They are written with the plain operators of PyTorch, and reduce over space once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pooling(nn.Module):
    """A map from (N, channels, h, w) to (N, out_channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels


class AveragePooling(Pooling):
    """The mean of each channel over the slide."""

    def forward(self, features: Tensor) -> Tensor:
        return features.mean(dim=(2, 3))


class MaxPooling(Pooling):
    """The maximum of each channel over the slide; positions that share it share its gradient."""

    def forward(self, features: Tensor) -> Tensor:
        return features.amax(dim=(2, 3))


class GeneralisedMeanPooling(Pooling):
    """The p-mean of each channel, (mean xᵖ)^(1/p): average for p = 1, maximum for p → ∞.

    Negative features count as 0.
    """

    def __init__(self, channels: int, p: float = 4.0, eps: float = 1e-4) -> None:
        super().__init__(channels)
        if p < 1:
            raise ValueError(f"p is {p}; the generalised mean needs p of at least 1")
        self.p = p
        self.eps = eps  # a zero map has no gradient without it

    def forward(self, features: Tensor) -> Tensor:
        powers = features.clamp(min=self.eps) ** self.p
        return powers.mean(dim=(2, 3)) ** (1.0 / self.p)


class AttentionPooling(Pooling):
    """A weighted mean over the slide, the weights from gated attention: softmax of w·(tanh(Vh) ⊙
    sigmoid(Uh)).
    """

    def __init__(self, channels: int, hidden: int = 32) -> None:
        super().__init__(channels)
        self.value = nn.Conv2d(channels, hidden, 1)
        self.gate = nn.Conv2d(channels, hidden, 1)
        self.score = nn.Conv2d(hidden, 1, 1)

    def scores(self, features: Tensor) -> Tensor:
        """The logit of attention of each position, (N, 1, h, w)."""
        return self.score(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))

    def forward(self, features: Tensor) -> Tensor:
        weights = functional.softmax(self.scores(features).flatten(2), dim=-1)
        return (features.flatten(2) * weights).sum(dim=-1)


class TopKPooling(Pooling):
    """The mean of the k largest values of each channel: a maximum that hears more than one position."""

    def __init__(self, channels: int, k: int = 16) -> None:
        super().__init__(channels)
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        self.k = k

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(2)
        return flat.topk(min(self.k, flat.shape[-1]), dim=-1).values.mean(dim=-1)
