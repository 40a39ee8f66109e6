"""SqueezeNet 1.1: unpadded stem, ceil-mode max pools, fire blocks, and a ReLU before the global average.

Smallest side: 17.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

# squeeze and expand channels; None is a max pool
_BLOCKS = ((16, 64), (16, 64), None, (32, 128), (32, 128), None, (48, 192), (48, 192), (64, 256), (64, 256))


class Fire(nn.Module):
    def __init__(self, channels: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeeze, kernel_size=1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, kernel_size=1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, kernel_size=3, padding=1)
        # One activation for all three: the same module called thrice, in place each time.
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.squeeze(x))
        return torch.cat([self.activation(self.expand1x1(x)), self.activation(self.expand3x3(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(
        self, *, in_channels: int = 3, num_classes: int = 1000, width_mult: float = 1.0, dropout: float = 0.5
    ) -> None:
        super().__init__()
        channels = scaled(64, width_mult)
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, kernel_size=3, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        ]
        for block in _BLOCKS:
            if block is None:
                layers.append(nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True))
                continue
            squeeze, expand = (scaled(c, width_mult) for c in block)
            layers.append(Fire(channels, squeeze, expand))
            channels = 2 * expand
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(p=dropout),
            nn.Conv2d(channels, num_classes, kernel_size=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d((1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


_tiny = partial(SqueezeNet, num_classes=6, width_mult=1 / 8)

ENTRIES = (
    ZooEntry("squeezenet", partial(_tiny, dropout=0.0), (2, 3, 113, 103), False, SqueezeNet, min_size=17),
    ZooEntry(
        # This dropout acts on the map, not on a vector: the positional one.
        "squeezenet_dropout",
        partial(_tiny, dropout=0.5),
        (2, 3, 89, 97),
        False,
        SqueezeNet,
        stochastic=True,
        min_size=17,
    ),
)
