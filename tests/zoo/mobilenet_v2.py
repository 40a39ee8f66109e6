"""MobileNetV2: inverted residuals, depthwise convolutions, ReLU6.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import make_divisible

# expansion, channels, repeats, stride
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvBNReLU6(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        padding = (kernel - 1) // 2
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(ConvBNReLU6(in_channels, hidden, 1))
        layers += [
            ConvBNReLU6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.use_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        if self.use_residual:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        divisor: int = 8,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        channels = make_divisible(32 * width_mult, divisor)
        last = make_divisible(1280 * max(1.0, width_mult), divisor) if width_mult >= 1 else 8 * channels
        features: list[nn.Module] = [ConvBNReLU6(in_channels, channels, 3, stride=2)]
        for expansion, width, repeats, stride in _STAGES:
            width = make_divisible(width * width_mult, divisor)
            for i in range(repeats):
                features.append(InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
                channels = width
        features.append(ConvBNReLU6(channels, last, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)


_tiny = partial(MobileNetV2, num_classes=4, width_mult=1 / 16, divisor=2, dropout=0.0)

ENTRIES = (ZooEntry("mobilenet_v2", _tiny, (2, 3, 113, 79), False, MobileNetV2),)
