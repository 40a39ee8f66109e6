"""One-dimensional networks on raw audio: strided convolutions, and gated causal dilated ones.

Smallest length: 1024 for ``WaveClassifier`` (its strides multiply to that); 1 for ``CausalNet``.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


class WaveClassifier(nn.Module):
    """M5-style: a kernel of eighty samples, then short ones, each followed by a max pool of four."""

    def __init__(self, *, in_channels: int = 1, num_classes: int = 35, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = scaled(128, width_mult)
        self.conv1 = nn.Conv1d(in_channels, channels, kernel_size=80, stride=4, padding=38)
        self.bn1 = nn.BatchNorm1d(channels)
        self.blocks = nn.ModuleList()
        for width in (128, 256, 512):
            width = scaled(width, width_mult)
            self.blocks.append(
                nn.Sequential(nn.Conv1d(channels, width, kernel_size=3, padding=1), nn.BatchNorm1d(width), nn.ReLU())
            )
            channels = width
        self.pool = nn.MaxPool1d(4)
        self.fc1 = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        for block in self.blocks:
            x = self.pool(block(x))
        x = F.avg_pool1d(x, x.shape[-1])
        x = x.permute(0, 2, 1)
        return self.fc1(x).squeeze(1)


class CausalConv1d(nn.Conv1d):
    """Padded on the left only, so that no output sees a later sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class CausalNet(nn.Module):
    """WaveNet-style; the output is a map of the input's length."""

    def __init__(
        self, *, in_channels: int = 1, num_classes: int = 256, width_mult: float = 1.0, layers: int = 10
    ) -> None:
        super().__init__()
        channels = scaled(64, width_mult)
        self.start = CausalConv1d(in_channels, channels, 2)
        self.gated = nn.ModuleList(CausalConv1d(channels, 2 * channels, 2, dilation=2**i) for i in range(layers))
        self.skip = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        # The last layer's residual would feed nothing.
        self.residual = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers - 1))
        self.end = nn.Sequential(
            nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, num_classes, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        total = torch.zeros_like(x)
        for i, (gated, skip) in enumerate(zip(self.gated, self.skip, strict=True)):
            signal, gate = torch.split(gated(x), x.size(1), dim=1)
            y = torch.tanh(signal) * torch.sigmoid(gate)
            total = total + skip(y)
            if i < len(self.residual):
                x = x + self.residual[i](y)
        return self.end(total)


ENTRIES = (
    ZooEntry(
        "wave_classifier",
        partial(WaveClassifier, num_classes=4, width_mult=1 / 16),
        (2, 1, 4099),
        False,
        WaveClassifier,
        min_size=1024,
    ),
    ZooEntry(
        "causal_net",
        partial(CausalNet, num_classes=5, width_mult=1 / 16, layers=4),
        (2, 1, 257),
        True,
        CausalNet,
    ),
)
