"""MobileNetV3-large: squeeze-and-excite gates that rejoin the map, hardswish, 5x5 depthwise kernels.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import make_divisible

# kernel, expanded channels, channels, squeeze-excite, hardswish, stride
_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)

_norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, divisor: int) -> None:
        super().__init__()
        squeezed = make_divisible(channels / 4, divisor)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale), inplace=True)
        return F.hardsigmoid(self.fc2(scale), inplace=True) * x


class Block(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden: int,
        kernel: int,
        stride: int,
        squeeze_excite: bool,
        hardswish: bool,
        divisor: int,
    ) -> None:
        super().__init__()
        self.residual = stride == 1 and in_channels == out_channels
        activation = nn.Hardswish if hardswish else nn.ReLU
        layers: list[nn.Module] = []
        if hidden != in_channels:
            layers += [nn.Conv2d(in_channels, hidden, 1, bias=False), _norm(hidden), activation(inplace=True)]
        padding = kernel // 2
        layers += [
            nn.Conv2d(hidden, hidden, kernel, stride, padding, groups=hidden, bias=False),
            _norm(hidden),
            activation(inplace=True),
        ]
        if squeeze_excite:
            layers.append(SqueezeExcite(hidden, divisor))
        layers += [nn.Conv2d(hidden, out_channels, 1, bias=False), _norm(out_channels)]
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        if self.residual:
            result += x
        return result


class MobileNetV3(nn.Module):
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

        def width(channels: int) -> int:
            return make_divisible(channels * width_mult, divisor)

        channels = width(16)
        self.conv_stem = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.bn1 = _norm(channels)
        blocks = []
        for kernel, hidden, out, squeeze_excite, hardswish, stride in _LARGE:
            blocks.append(
                Block(channels, width(out), width(hidden), kernel, stride, squeeze_excite, hardswish, divisor)
            )
            channels = width(out)
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(channels, 6 * channels, 1, bias=False)
        self.bn2 = _norm(6 * channels)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, width(1280)),
            nn.Hardswish(inplace=True),
            nn.Dropout(p=dropout, inplace=True),
            nn.Linear(width(1280), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn1(self.conv_stem(x)), inplace=True)
        x = self.blocks(x)
        x = F.hardswish(self.bn2(self.conv_head(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.classifier(x)


_tiny = partial(MobileNetV3, num_classes=4, width_mult=1 / 16, divisor=2)

ENTRIES = (
    ZooEntry("mobilenet_v3_large", partial(_tiny, dropout=0.0), (2, 3, 97, 127), False, MobileNetV3),
    ZooEntry(
        "mobilenet_v3_large_dropout",
        partial(_tiny, dropout=0.2),
        (2, 3, 67, 83),
        False,
        MobileNetV3,
        stochastic=True,
    ),
)
