"""DenseNet: every layer reads the concatenation of all before it.

Smallest side: 29 (five halvings, of which the last three do not pad).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(self.relu1(self.norm1(x)))
        x = self.conv2(self.relu2(self.norm2(x)))
        if self.dropout > 0:
            x = F.dropout(x, p=self.dropout, training=self.training)
        return x


class DenseBlock(nn.ModuleDict):
    def __init__(self, depth: int, channels: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__()
        for i in range(depth):
            self[f"denselayer{i + 1}"] = DenseLayer(channels + i * growth, growth, bottleneck, dropout)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(kernel_size=2, stride=2),
        )
    )


class DenseNet(nn.Module):
    def __init__(
        self,
        depths: Sequence[int] = (6, 12, 24, 16),
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        growth: int = 32,
        stem_channels: int = 64,
        bottleneck: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(in_channels, stem_channels, kernel_size=7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(stem_channels),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        )
        channels = stem_channels
        for i, depth in enumerate(depths, start=1):
            self.features.add_module(f"denseblock{i}", DenseBlock(depth, channels, growth, bottleneck, dropout))
            channels += depth * growth
            if i < len(depths):
                self.features.add_module(f"transition{i}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(torch.flatten(out, 1))


_tiny = partial(DenseNet, (2, 3, 3, 2), num_classes=4, growth=4, stem_channels=8, bottleneck=2)

ENTRIES = (
    ZooEntry("densenet121", _tiny, (2, 3, 103, 127), False, DenseNet, min_size=29),
    ZooEntry(
        "densenet121_dropout",
        partial(_tiny, dropout=0.2),
        (2, 3, 89, 71),
        False,
        partial(DenseNet, dropout=0.2),
        stochastic=True,
        min_size=29,
    ),
)
