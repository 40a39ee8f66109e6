"""DarkNet-19: leaky ReLU, 3x3 and 1x1 convolutions in turn, a 1x1 convolution as the classifier.

Smallest side: 32.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

# The channels of each stage's convolutions: 3x3, 1x1, 3x3 and so on.  A max pool goes between stages.
_STAGES = (
    (32,),
    (64,),
    (128, 64, 128),
    (256, 128, 256),
    (512, 256, 512, 256, 512),
    (1024, 512, 1024, 512, 1024),
)


class ConvLeaky(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding="same", bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu_(self.bn(self.conv(x)), 0.1)


class DarkNet19(nn.Module):
    def __init__(self, *, in_channels: int = 3, num_classes: int = 1000, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = in_channels
        self.stages = nn.ModuleList()
        for stage in _STAGES:
            convs = nn.ModuleList()
            for i, width in enumerate(stage):
                width = scaled(width, width_mult)
                convs.append(ConvLeaky(channels, width, 1 if i % 2 else 3))
                channels = width
            self.stages.append(convs)
        self.classifier = nn.Conv2d(channels, num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            if i > 0:
                x = F.max_pool2d(x, 2)
            assert isinstance(stage, nn.ModuleList)
            for conv in stage:
                x = conv(x)
        x = self.classifier(x)
        return x.view(x.size(0), x.size(1), -1).mean(dim=2)


ENTRIES = (
    ZooEntry(
        "darknet19",
        partial(DarkNet19, num_classes=4, width_mult=1 / 16),
        (2, 3, 131, 109),
        False,
        DarkNet19,
        min_size=32,
    ),
)
