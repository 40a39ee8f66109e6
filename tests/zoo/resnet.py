"""ResNet with the standard stem, with the deep stem and average-pooled shortcuts of ResNet-D, and dilated.

Smallest side: 1 with a batch of two (train-mode BatchNorm needs two values for each channel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

NormFactory = Callable[[int], nn.Module]


def conv3x3(in_channels: int, out_channels: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=dilation, dilation=dilation, bias=False)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int,
        dilation: int,
        shortcut: nn.Module | None,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride, dilation)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes, 1, dilation)
        self.bn2 = norm(planes)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.shortcut is not None:
            identity = self.shortcut(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int,
        dilation: int,
        shortcut: nn.Module | None,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.conv1 = conv1x1(inplanes, planes)
        self.bn1 = norm(planes)
        self.conv2 = conv3x3(planes, planes, stride, dilation)
        self.bn2 = norm(planes)
        self.conv3 = conv1x1(planes, planes * self.expansion)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        identity = x if self.shortcut is None else self.shortcut(x)
        return self.relu(out.add_(identity))


class ResNet(nn.Module):
    """``dilate[i]`` replaces the stride of stage ``i`` by dilation, as DeepLab does."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        norm: NormFactory = nn.BatchNorm2d,
        deep_stem: bool = False,
        average_down: bool = False,
        dilate: Sequence[bool] = (False, False, False, False),
    ) -> None:
        super().__init__()
        width = scaled(64, width_mult)
        self.norm = norm
        self.average_down = average_down
        self.inplanes = width
        self.dilation = 1
        self.conv1 = _deep_stem(in_channels, width, norm) if deep_stem else _stem(in_channels, width)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.stage_channels = [width * 2**i * block.expansion for i in range(4)]
        self.layer1 = self._stage(block, width, depths[0], 1, dilate[0])
        self.layer2 = self._stage(block, width * 2, depths[1], 2, dilate[1])
        self.layer3 = self._stage(block, width * 4, depths[2], 2, dilate[2])
        self.layer4 = self._stage(block, width * 8, depths[3], 2, dilate[3])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.stage_channels[-1], num_classes)

    def _stage(
        self, block: type[BasicBlock] | type[Bottleneck], planes: int, depth: int, stride: int, dilate: bool
    ) -> nn.Sequential:
        first_dilation = self.dilation
        if dilate:
            self.dilation *= stride
            stride = 1
        channels = planes * block.expansion
        shortcut = None
        if stride != 1 or self.inplanes != channels:
            shortcut = self._shortcut(channels, stride)
        blocks = [block(self.inplanes, planes, stride, first_dilation, shortcut, self.norm)]
        self.inplanes = channels
        for _ in range(1, depth):
            blocks.append(block(channels, planes, 1, self.dilation, None, self.norm))
        return nn.Sequential(*blocks)

    def _shortcut(self, channels: int, stride: int) -> nn.Sequential:
        if self.average_down and stride > 1:
            pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
            return nn.Sequential(pool, conv1x1(self.inplanes, channels), self.norm(channels))
        return nn.Sequential(conv1x1(self.inplanes, channels, stride), self.norm(channels))

    def forward_stages(self, x: Tensor) -> list[Tensor]:
        """The outputs of the four stages, at strides 4, 8, 16 and 32 unless dilated."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        stages = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
            stages.append(x)
        return stages

    def forward(self, x: Tensor) -> Tensor:
        x = self.forward_stages(x)[-1]
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def _stem(in_channels: int, width: int) -> nn.Module:
    return nn.Conv2d(in_channels, width, kernel_size=7, stride=2, padding=3, bias=False)


def _deep_stem(in_channels: int, width: int, norm: NormFactory) -> nn.Module:
    half = max(1, width // 2)
    return nn.Sequential(
        conv3x3(in_channels, half, stride=2),
        norm(half),
        nn.ReLU(inplace=True),
        conv3x3(half, half),
        norm(half),
        nn.ReLU(inplace=True),
        conv3x3(half, width),
    )


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet50_d = partial(resnet50, deep_stem=True, average_down=True)
resnet50_dilated = partial(resnet50, dilate=(False, False, True, True))

_tiny: dict[str, Any] = {"num_classes": 4, "width_mult": 1 / 16}

ENTRIES = (
    ZooEntry("resnet18", partial(resnet18, **_tiny), (2, 3, 107, 131), False, resnet18),
    ZooEntry("resnet34", partial(resnet34, **_tiny), (2, 3, 89, 113), False, resnet34),
    ZooEntry("resnet50", partial(resnet50, **_tiny), (2, 3, 101, 83), False, resnet50),
    ZooEntry("resnet50_d", partial(resnet50_d, **_tiny), (2, 3, 79, 109), False, resnet50_d),
    ZooEntry("resnet50_dilated", partial(resnet50_dilated, **_tiny), (2, 3, 97, 73), False, resnet50_dilated),
)
