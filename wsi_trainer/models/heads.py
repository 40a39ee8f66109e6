"""Heads: from the map of features of a whole slide to one vector for it.

Each head is built with the number of channels of the map: `AveragePooling(64)`. The vector it returns has
`out_channels` entries. They are written with the plain operators of PyTorch, and reduce over space once. Each takes
the positions that count as a second map: 1 where a position counts and 0 where not (`pool_over: tissue`); what it
returns is then what it would return had the slide no other positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pooling(nn.Module):
    """A map from (N, channels, h, w) to (N, out_channels).

    Attributes:
        branches: Vectors side by side in the one returned, one for each output of the task; 1 where they share one.
    """

    branches = 1

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels

    def attach(self, outputs: int) -> None:
        """Hear the number of outputs of the task, before first use."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class AveragePooling(Pooling):
    """The mean of each channel over the slide."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return _mean(features, counts)


class MaxPooling(Pooling):
    """The maximum of each channel over the slide; positions that share it share its gradient."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return lowered(features, counts).amax(dim=(2, 3))


class GeneralisedMeanPooling(Pooling):
    """The p-mean of each channel, (mean xᵖ)^(1/p): average for p = 1, maximum for p → ∞.

    Negative features count as 0.
    """

    def __init__(self, channels: int, p: float = 4.0, eps: float = 1e-4) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            p: The exponent, at least 1.
            eps: Smallest feature; a map of zeros has no gradient without it.
        """
        super().__init__(channels)
        if p < 1:
            raise ValueError(f"p is {p}; the generalised mean needs p of at least 1")
        self.p = p
        self.eps = eps

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return _mean(features.clamp(min=self.eps) ** self.p, counts) ** (1.0 / self.p)


class AttentionPooling(Pooling):
    """A weighted mean over the slide, the weights from gated attention.

    They are the softmax of w·(tanh(Vh) ⊙ sigmoid(Uh)).
    """

    def __init__(self, channels: int, hidden: int = 32) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            hidden: Channels of V and U.
        """
        super().__init__(channels)
        self.value = nn.Conv2d(channels, hidden, 1)
        self.gate = nn.Conv2d(channels, hidden, 1)
        self.score = nn.Conv2d(hidden, 1, 1)

    def scores(self, features: Tensor) -> Tensor:
        """The logit of attention of each position, (N, branches, h, w)."""
        return self.score(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        scores = lowered(self.scores(features), counts)
        return attended(features, scores)


class ClassAttentionPooling(AttentionPooling):
    """Gated attention with a branch for each output of the task, as in CLAM with several branches.

    V and U are shared, each output has its own w, so its own weights over the slide and its own vector; the last
    layer gives each output its vector alone.
    """

    def attach(self, outputs: int) -> None:
        self.branches = outputs
        self.out_channels *= outputs
        self.score = nn.Conv2d(self.score.in_channels, outputs, 1)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        scores = lowered(self.scores(features), counts)
        return torch.cat([attended(features, scores[:, i : i + 1]) for i in range(self.branches)], dim=1)


class TopKPooling(Pooling):
    """The mean of the k largest values of each channel: a maximum that hears more than one position."""

    def __init__(self, channels: int, k: int = 16) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            k: How many; all positions where there are fewer.
        """
        super().__init__(channels)
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        self.k = k

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        flat = lowered(features, counts).flatten(2)
        largest = flat.topk(min(self.k, flat.shape[-1]), dim=-1).values
        if counts is None:
            return largest.mean(dim=-1)
        number = counts.sum(dim=(2, 3))[:, :, None]  # where fewer than k count, the rest are lowered values
        counted = torch.arange(largest.shape[-1], device=largest.device) < number
        return torch.where(counted, largest, torch.zeros_like(largest)).sum(dim=-1) / counted.sum(dim=-1)


def _mean(features: Tensor, counts: Tensor | None) -> Tensor:
    if counts is None:
        return features.mean(dim=(2, 3))
    return (features * counts).sum(dim=(2, 3)) / counts.sum(dim=(2, 3))


def lowered(features: Tensor, counts: Tensor | None) -> Tensor:
    """The features, far below all others where a position does not count.

    Not −∞, which has no difference from itself: half the lowest number there is does the same and stays a number.
    """
    if counts is None:
        return features
    return features.masked_fill(counts == 0, torch.finfo(features.dtype).min / 2)


def attended(features: Tensor, scores: Tensor) -> Tensor:
    """The mean of the features, weighted by the softmax of one map of scores."""
    weights = functional.softmax(scores.flatten(2), dim=-1)
    return (features.flatten(2) * weights).sum(dim=-1)
