"""Xception: separable convolutions, an unpadded stem, strided shortcuts beside padded max pools.

Smallest side: 7.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


class SeparableConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(in_channels, in_channels, 3, padding=1, groups=in_channels, bias=False)
        self.pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(x))


class Block(nn.Module):
    """Separable convolutions with a ReLU before each; the first ReLU must not touch the shortcut's input."""

    def __init__(self, channels: list[int], stride: int, relu_first: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.ReLU(inplace=True), SeparableConv(before, after), nn.BatchNorm2d(after)]
        layers[0] = nn.ReLU(inplace=False)
        if not relu_first:
            layers = layers[1:]
        if stride != 1:
            layers.append(nn.MaxPool2d(3, stride, padding=1))
        self.rep = nn.Sequential(*layers)
        self.skip: nn.Conv2d | None = None
        if stride != 1 or channels[0] != channels[-1]:
            self.skip = nn.Conv2d(channels[0], channels[-1], 1, stride, bias=False)
            self.skipbn = nn.BatchNorm2d(channels[-1])

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        if self.skip is not None:
            skip = self.skipbn(self.skip(x))
        x = self.rep(x)
        x += skip
        return x


class Xception(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        middle: int = 8,
    ) -> None:
        super().__init__()
        c = {n: scaled(n, width_mult) for n in (32, 64, 128, 256, 728, 1024, 1536, 2048)}
        self.conv1 = nn.Conv2d(in_channels, c[32], 3, 2, 0, bias=False)
        self.bn1 = nn.BatchNorm2d(c[32])
        self.conv2 = nn.Conv2d(c[32], c[64], 3, bias=False)
        self.bn2 = nn.BatchNorm2d(c[64])
        self.entry = nn.Sequential(
            Block([c[64], c[128], c[128]], 2, relu_first=False),
            Block([c[128], c[256], c[256]], 2),
            Block([c[256], c[728], c[728]], 2),
        )
        self.middle = nn.Sequential(*(Block([c[728]] * 4, 1) for _ in range(middle)))
        self.exit = Block([c[728], c[728], c[1024]], 2)
        self.conv3 = SeparableConv(c[1024], c[1536])
        self.bn3 = nn.BatchNorm2d(c[1536])
        self.conv4 = SeparableConv(c[1536], c[2048])
        self.bn4 = nn.BatchNorm2d(c[2048])
        self.fc = nn.Linear(c[2048], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.bn1(self.conv1(x)))
        x = F.relu_(self.bn2(self.conv2(x)))
        x = self.exit(self.middle(self.entry(x)))
        x = F.relu(self.bn3(self.conv3(x)), inplace=True)
        x = F.relu(self.bn4(self.conv4(x)), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(x.view(x.size(0), -1))


_tiny = partial(Xception, num_classes=4, width_mult=1 / 32, middle=2)

ENTRIES = (ZooEntry("xception", _tiny, (2, 3, 107, 121), False, Xception, min_size=7),)
