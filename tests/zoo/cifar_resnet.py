"""The ResNet of CIFAR, with zero-padded shortcuts. Smallest side: 1 with a batch of two."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


class PaddedShortcutBlock(nn.Module):
    """The shortcut without parameters: every second position, and zeros for the channels that are new."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.new_channels = channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride != 1 or self.new_channels:
            before = self.new_channels // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before), "constant", 0)
        out += x
        return F.relu(out)


class CifarResNet(nn.Module):
    """Three stages of sixteen, thirty-two and sixty-four channels; ``depth=3`` is ResNet-20."""

    def __init__(self, *, depth: int = 3, in_channels: int = 3, num_classes: int = 10, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = scaled(16, width_mult)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = []
        for stage in range(3):
            for i in range(depth):
                width = scaled(16 * 2**stage, width_mult)
                blocks.append(PaddedShortcutBlock(channels, width, 2 if stage and i == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.bn1(self.conv1(x))))
        out = F.avg_pool2d(out, (out.size(2), out.size(3)))
        return self.linear(out.view(out.size(0), -1))


ENTRIES = (ZooEntry("cifar_resnet20", partial(CifarResNet, width_mult=0.25), (2, 3, 61, 47), False, CifarResNet),)
