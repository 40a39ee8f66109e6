"""VGG: stacks of 3x3 convolutions, then either three linear layers or a global pool.

Smallest side: 32 (five max pools of two).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

VGG16 = (2, 2, 3, 3, 3)
VGG19 = (2, 2, 4, 4, 4)
_WIDTHS = (64, 128, 256, 512, 512)


def _features(depths: Sequence[int], in_channels: int, width_mult: float, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = in_channels
    for depth, width in zip(depths, _WIDTHS, strict=True):
        width = scaled(width, width_mult)
        for _ in range(depth):
            layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """The published head: pooled to 7x7 whatever the image's size, flattened, three linear layers."""

    def __init__(
        self,
        depths: Sequence[int],
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        hidden: int = 4096,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.features = _features(depths, in_channels, width_mult, batch_norm)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(scaled(512, width_mult) * 7 * 7, hidden),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


class GlobalVGG(nn.Module):
    """The variant people train on slides: the mean or the maximum over all positions, one linear layer."""

    def __init__(
        self,
        depths: Sequence[int],
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        batch_norm: bool = False,
        pooling: str = "mean",
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "max"):
            raise ValueError(f"pooling must be 'mean' or 'max', not {pooling!r}")
        self.features = _features(depths, in_channels, width_mult, batch_norm)
        self.pooling = pooling
        self.fc = nn.Linear(scaled(512, width_mult), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        pooled = h.mean(dim=(2, 3)) if self.pooling == "mean" else h.amax((-2, -1))
        return self.fc(pooled)


_tiny = partial(VGG, num_classes=5, width_mult=1 / 16, hidden=24, dropout=0.0)
_tiny_global = partial(GlobalVGG, num_classes=5, width_mult=1 / 16)

ENTRIES = (
    # 8 x 7 positions reach the 7 x 7 pool, so that its windows overlap in one direction only.
    ZooEntry("vgg16", partial(_tiny, VGG16), (1, 3, 269, 233), False, partial(VGG, VGG16), min_size=32),
    ZooEntry("vgg19", partial(_tiny, VGG19), (1, 3, 233, 257), False, partial(VGG, VGG19), min_size=32),
    ZooEntry(
        "vgg16_bn",
        partial(_tiny, VGG16, batch_norm=True),
        (2, 3, 127, 149),
        False,
        partial(VGG, VGG16, batch_norm=True),
        min_size=32,
    ),
    ZooEntry(
        "vgg16_dropout",
        partial(_tiny, VGG16, dropout=0.5),
        (2, 3, 97, 131),
        False,
        partial(VGG, VGG16),
        stochastic=True,
        min_size=32,
    ),
    ZooEntry(
        "vgg16_mean",
        partial(_tiny_global, VGG16),
        (2, 3, 113, 167),
        False,
        partial(GlobalVGG, VGG16),
        min_size=32,
    ),
    ZooEntry(
        "vgg19_max",
        partial(_tiny_global, VGG19, pooling="max"),
        (2, 3, 139, 101),
        False,
        partial(GlobalVGG, VGG19, pooling="max"),
        min_size=32,
    ),
)
