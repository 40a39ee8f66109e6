"""RegNetY-400MF: grouped 3x3 bottlenecks of a fixed group width, with squeeze-and-excite.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

_STAGES = ((48, 1), (104, 3), (208, 6), (440, 6))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x).expand_as(x)


class Block(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.proj: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.proj = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        groups = channels // group_width
        self.f = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            SqueezeExcite(channels, max(2, round(0.25 * in_channels))),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.proj(x) if self.proj is not None else x
        return torch.relu_(shortcut + self.f(x))


class RegNetY(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        group_width: int = 8,
    ) -> None:
        super().__init__()
        channels = scaled(32, width_mult)
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        for i, (width, depth) in enumerate(_STAGES, start=1):
            width = scaled(width, width_mult, divisor=group_width)
            stage = nn.Sequential()
            for j in range(depth):
                stage.add_module(f"b{j + 1}", Block(channels, width, 2 if j == 0 else 1, group_width))
                channels = width
            self.add_module(f"s{i}", stage)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.named_children():
            if name == "fc":
                break
            x = child(x)
        return self.fc(torch.mean(x, dim=(2, 3)))


_tiny = partial(RegNetY, num_classes=4, width_mult=1 / 16, group_width=2)

ENTRIES = (ZooEntry("regnet_y_400mf", _tiny, (2, 3, 101, 97), False, RegNetY),)
