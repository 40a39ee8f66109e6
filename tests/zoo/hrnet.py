"""HRNet-style: branches at several strides run side by side and exchange maps after each stage.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


def _unit(in_channels: int, out_channels: int, kernel: int, stride: int, relu: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels, momentum=0.01),
    ]
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_unit(channels, channels, 3, 1), _unit(channels, channels, 3, 1, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x)


class Exchange(nn.Module):
    """Every branch becomes the sum of all, brought to its stride: finer by convolution, coarser resized."""

    def __init__(self, widths: list[int], mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.fuse = nn.ModuleList()
        for target, out in enumerate(widths):
            row = nn.ModuleList()
            for source, width in enumerate(widths):
                row.append(self._path(width, out, source, target))
            self.fuse.append(row)

    @staticmethod
    def _path(width: int, out: int, source: int, target: int) -> nn.Module:
        if source == target:
            return nn.Identity()
        if source > target:
            return _unit(width, out, 1, 1, relu=False)
        steps = target - source
        convs = [_unit(width, width, 3, 2) for _ in range(steps - 1)]
        return nn.Sequential(*convs, _unit(width, out, 3, 2, relu=False))

    def _resize(self, x: Tensor, like: Tensor) -> Tensor:
        align = False if self.mode == "bilinear" else None
        return F.interpolate(x, size=like.shape[-2:], mode=self.mode, align_corners=align)

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        fused = []
        for target, row in enumerate(self.fuse):
            assert isinstance(row, nn.ModuleList)
            total: Tensor | None = None
            for source, path in enumerate(row):
                y = path(branches[source])
                if source > target:
                    y = self._resize(y, branches[target])
                total = y if total is None else total + y
            assert total is not None
            fused.append(F.relu(total))
        return fused


class HRNet(nn.Module):
    """Dense: all branches are resized to the finest and joined.  Else: each is pooled to its mean first."""

    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 19,
        width_mult: float = 1.0,
        branches: int = 4,
        blocks: int = 4,
        mode: str = "nearest",
        dense: bool = True,
    ) -> None:
        super().__init__()
        stem = scaled(64, width_mult)
        widths = [scaled(32 * 2**i, width_mult) for i in range(branches)]
        self.dense = dense
        self.stem = nn.Sequential(_unit(in_channels, stem, 3, 2), _unit(stem, stem, 3, 2))
        self.first = _unit(stem, widths[0], 3, 1)
        self.new_branches = nn.ModuleList(_unit(a, b, 3, 2) for a, b in pairwise(widths))
        self.stages = nn.ModuleList()
        self.exchanges = nn.ModuleList()
        for count in range(1, branches + 1):
            stage = nn.ModuleList(nn.Sequential(*(Residual(w) for _ in range(blocks))) for w in widths[:count])
            self.stages.append(stage)
            self.exchanges.append(Exchange(widths[:count], mode) if count > 1 else nn.Identity())
        self.head = nn.Conv2d(sum(widths), num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        maps = [self.first(self.stem(x))]
        for i, (stage, exchange) in enumerate(zip(self.stages, self.exchanges, strict=True)):
            if i > 0:
                maps.append(self.new_branches[i - 1](maps[-1]))
            assert isinstance(stage, nn.ModuleList)
            maps = exchange([branch(y) for branch, y in zip(stage, maps, strict=True)])
        if not self.dense:
            pooled = [F.adaptive_avg_pool2d(y, 1) for y in maps]
            return self.head(torch.cat(pooled, dim=1)).flatten(1)
        finest = maps[0].shape[-2:]
        maps = [maps[0]] + [F.interpolate(y, finest, mode="bilinear", align_corners=False) for y in maps[1:]]
        logits = self.head(torch.cat(maps, dim=1))
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


_tiny: dict[str, Any] = {"num_classes": 3, "width_mult": 1 / 8, "branches": 3, "blocks": 1}

ENTRIES = (
    ZooEntry("hrnet", partial(HRNet, **_tiny), (2, 3, 67, 59), True, HRNet),
    ZooEntry(
        "hrnet_classifier",
        partial(HRNet, mode="bilinear", dense=False, **_tiny),
        (2, 3, 71, 83),
        False,
        partial(HRNet, mode="bilinear", dense=False),
    ),
)
