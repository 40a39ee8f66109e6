"""Changes that people make to a ResNet: zero-padded shortcuts, standardised weights, blur pools.

Smallest side: 1 with a batch of two; 11 for the blur-pooled one (reflection needs a position to reflect).
"""

from __future__ import annotations

from functools import partial

import torch
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


class StandardisedConv2d(nn.Conv2d):
    """The kernel that is used is computed from the parameter at every call."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class PreactivationBlock(nn.Module):
    """GroupNorm and ReLU before each convolution; the shortcut starts from the activated input."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(2, in_channels)
        self.conv1 = StandardisedConv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, channels)
        self.conv2 = StandardisedConv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.shortcut = StandardisedConv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        residual = x if self.shortcut is None else self.shortcut(activated)
        out = self.conv1(activated)
        return self.conv2(F.relu(self.norm2(out))) + residual


class StandardisedResNet(nn.Module):
    """Big-Transfer style: no batch statistics at all, a GroupNorm over the whole image instead."""

    def __init__(self, *, in_channels: int = 3, num_classes: int = 1000, width_mult: float = 1.0) -> None:
        super().__init__()
        widths = [scaled(64 * 2**i, width_mult, divisor=2) for i in range(4)]
        self.root = StandardisedConv2d(in_channels, widths[0], 7, stride=2, padding=3, bias=False)
        self.pad = nn.ConstantPad2d(1, 0.0)
        self.pool = nn.MaxPool2d(3, stride=2)
        blocks = []
        channels = widths[0]
        for i, width in enumerate(widths):
            blocks += [
                PreactivationBlock(channels, width, 2 if i else 1),
                PreactivationBlock(width, width, 1),
            ]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(2, channels)
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.pad(self.root(x))))
        x = F.relu(self.norm(x))
        x = torch.mean(x, dim=[2, 3], keepdim=True)
        return self.head(x)[..., 0, 0]


class BlurPool(nn.Module):
    """A fixed binomial filter, the same for every channel, with reflected borders and stride two."""

    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", (row[:, None] * row[None, :])[None, None].repeat(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1, 1, 1), mode="reflect")
        return F.conv2d(x, self.kernel, stride=2, groups=x.shape[1])


class BlurNet(nn.Module):
    """Anti-aliased: a stride-one max pool and convolution, each followed by a blur pool."""

    def __init__(self, *, in_channels: int = 3, num_classes: int = 1000, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = scaled(64, width_mult)
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, stride=1),
            BlurPool(channels),
        )
        stages: list[nn.Module] = []
        for _ in range(2):
            stages += [
                nn.Conv2d(channels, 2 * channels, 3, padding=1, padding_mode="replicate", bias=False),
                nn.BatchNorm2d(2 * channels),
                nn.PReLU(2 * channels),
                BlurPool(2 * channels),
            ]
            channels *= 2
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).squeeze(3).squeeze(2))


ENTRIES = (
    ZooEntry("cifar_resnet20", partial(CifarResNet, width_mult=0.25), (2, 3, 61, 47), False, CifarResNet),
    ZooEntry(
        "standardised_resnet",
        partial(StandardisedResNet, num_classes=4, width_mult=1 / 16),
        (2, 3, 83, 97),
        False,
        StandardisedResNet,
    ),
    ZooEntry(
        "blur_resnet",
        partial(BlurNet, num_classes=4, width_mult=1 / 16),
        (2, 3, 73, 101),
        False,
        BlurNet,
        min_size=11,
    ),
)
