"""GoogLeNet with BatchNorm: ceil-mode max pools, and a stride-one max pool in every branch block.

Smallest side: 31 (a ceil-mode pool takes two positions and more).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

# (1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection); None is a max pool of stride two.
_BLOCKS: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _unit(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels, eps=0.001),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    def __init__(self, channels: int, one: int, r3: int, three: int, r5: int, five: int, proj: int) -> None:
        super().__init__()
        self.branch1 = _unit(channels, one, 1)
        self.branch2 = nn.Sequential(_unit(channels, r3, 1), _unit(r3, three, 3))
        self.branch3 = nn.Sequential(_unit(channels, r5, 1), _unit(r5, five, 5))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1, ceil_mode=True), _unit(channels, proj, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        c64, c192 = scaled(64, width_mult), scaled(192, width_mult)
        self.conv1 = _unit(in_channels, c64, 7, stride=2)
        self.conv2 = _unit(c64, c64, 1)
        self.conv3 = _unit(c64, c192, 3)
        blocks: list[nn.Module] = []
        channels = c192
        for spec in _BLOCKS:
            if spec is None:
                blocks.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
                continue
            one, r3, three, r5, five, proj = (scaled(c, width_mult) for c in spec)
            blocks.append(Inception(channels, one, r3, three, r5, five, proj))
            channels = one + three + five + proj
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x), 3, stride=2, ceil_mode=True)
        x = F.max_pool2d(self.conv3(self.conv2(x)), 3, stride=2, ceil_mode=True)
        x = self.blocks(x)
        x = x.mean([2, 3])
        return self.fc(self.dropout(x))


_tiny = partial(GoogLeNet, num_classes=4, width_mult=1 / 16, dropout=0.0)

ENTRIES = (ZooEntry("googlenet", _tiny, (2, 3, 103, 89), False, GoogLeNet, min_size=31),)
