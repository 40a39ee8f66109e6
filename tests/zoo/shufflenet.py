"""ShuffleNetV2: channels split in two, half of them passed by, then shuffled through a five-dimensional view.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batch, channels, height, width)


def _pointwise(in_channels: int, out_channels: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def _depthwise(channels: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
    return [conv, nn.BatchNorm2d(channels)]


class Unit(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.stride = stride
        source = in_channels if stride > 1 else half
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(*_depthwise(in_channels, stride), *_pointwise(in_channels, half))
        self.branch2 = nn.Sequential(*_pointwise(source, half), *_depthwise(half, stride), *_pointwise(half, half))

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            kept, used = x.chunk(2, dim=1)
            out = torch.cat((kept, self.branch2(used)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(self, *, in_channels: int = 3, num_classes: int = 1000, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = scaled(24, width_mult)
        self.conv1 = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        units: list[nn.Module] = []
        for width, repeats in ((116, 4), (232, 8), (464, 4)):
            width = scaled(width, width_mult, divisor=2)
            for i in range(repeats):
                units.append(Unit(channels, width, 2 if i == 0 else 1))
                channels = width
        self.stages = nn.Sequential(*units)
        last = scaled(1024, width_mult)
        self.conv5 = nn.Sequential(*_pointwise(channels, last))
        self.fc = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.conv1(x))
        x = self.conv5(self.stages(x))
        return self.fc(x.mean([2, 3]))


ENTRIES = (
    ZooEntry(
        "shufflenet_v2",
        partial(ShuffleNetV2, num_classes=4, width_mult=1 / 8),
        (2, 3, 127, 107),
        False,
        ShuffleNetV2,
    ),
)
