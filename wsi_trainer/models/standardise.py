"""Zero mean and unit variance for a vector that comes one slide at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningStandardise(nn.Module):
    """Subtract the running mean and divide by the running standard deviation, in training as in evaluation.

    Pooled features of two slides differ by a few per cent of their mean, so a linear layer on them first
    has to learn to cancel that mean. BatchNorm would take it away, but with one slide in a batch there is
    no batch to take it from; the statistics of the slides seen so far serve instead. They are constants to
    the gradient.
    """

    def __init__(self, channels: int, momentum: float = 0.02, relative_floor: float = 0.01) -> None:
        """Build the layer.

        Args:
            channels: Entries of the vector.
            momentum: Weight of the newest slide once more than 1 / momentum slides were seen; until then
                all count alike.
            relative_floor: Smallest standard deviation, as a share of the mean: what varies less is not
                blown up.
        """
        super().__init__()
        self.momentum = momentum
        self.relative_floor = relative_floor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.variance: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._update(x.detach())
        floor = (self.relative_floor * self.mean) ** 2
        return (x - self.mean) * torch.rsqrt(self.variance + floor + 1e-8)

    @torch.no_grad()
    def _update(self, x: Tensor) -> None:
        self.seen += 1
        seen = int(self.seen)
        weight = max(self.momentum, 1 / seen)
        newest = x.mean(dim=0).to(self.mean.dtype)
        # In place is safe also with accumulation: backward needs neither of the two, only what was made of them.
        self.mean.lerp_(newest, weight)
        if seen > 1:
            self.variance.lerp_((newest - self.mean) ** 2, weight)
