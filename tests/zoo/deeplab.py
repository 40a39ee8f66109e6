"""DeepLab-v3+: a dilated ResNet, an atrous pyramid with a global branch, a decoder; and PSPNet.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .resnet import ResNet, resnet50, resnet50_dilated
from .widths import scaled


def _unit(in_channels: int, out_channels: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class GlobalBranch(nn.Sequential):
    """The mean over all positions, convolved, normalised over the batch alone, spread over the map."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), *_unit(in_channels, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        for layer in self:
            x = layer(x)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class AtrousPyramid(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, rates: Sequence[int], dropout: float) -> None:
        super().__init__()
        branches = [_unit(in_channels, out_channels)]
        branches += [_unit(in_channels, out_channels, 3, rate) for rate in rates]
        branches.append(GlobalBranch(in_channels, out_channels))
        self.convs = nn.ModuleList(branches)
        self.project = nn.Sequential(*_unit(len(branches) * out_channels, out_channels), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        for conv in self.convs:
            results.append(conv(x))
        return self.project(torch.cat(results, dim=1))


class DeepLab(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 21,
        width_mult: float = 1.0,
        rates: Sequence[int] = (12, 24, 36),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.backbone: ResNet = resnet50_dilated(in_channels=in_channels, width_mult=width_mult)
        del self.backbone.avgpool, self.backbone.fc
        channels, low = scaled(256, width_mult), scaled(48, width_mult)
        self.aspp = AtrousPyramid(self.backbone.stage_channels[-1], channels, rates, dropout)
        self.low_level = _unit(self.backbone.stage_channels[0], low)
        self.decoder = nn.Sequential(_unit(channels + low, channels, 3), nn.Conv2d(channels, num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *_, last = self.backbone.forward_stages(x)
        deep = F.interpolate(self.aspp(last), size=first.shape[2:], mode="bilinear", align_corners=True)
        logits = self.decoder(torch.cat([deep, self.low_level(first)], dim=1))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=True)


class PyramidPool(nn.Module):
    """Means over 1, 2 x 2, 3 x 3 and 6 x 6 regions that need not divide the map, each resized back."""

    def __init__(self, in_channels: int, out_channels: int, bins: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), *_unit(in_channels, out_channels)) for size in bins
        )

    def forward(self, x: Tensor) -> Tensor:
        size = (x.size(2), x.size(3))
        priors = [F.interpolate(stage(x), size, mode="bilinear", align_corners=True) for stage in self.stages]
        return torch.cat([x, *priors], dim=1)


class PSPNet(nn.Module):
    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 21,
        width_mult: float = 1.0,
        bins: Sequence[int] = (1, 2, 3, 6),
    ) -> None:
        super().__init__()
        self.backbone: ResNet = resnet50(
            in_channels=in_channels, width_mult=width_mult, dilate=(False, False, True, True)
        )
        del self.backbone.avgpool, self.backbone.fc
        channels = self.backbone.stage_channels[-1]
        branch = max(1, channels // len(bins))
        self.pool = PyramidPool(channels, branch, bins)
        self.head = nn.Sequential(_unit(channels + branch * len(bins), branch, 3), nn.Conv2d(branch, num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone.forward_stages(x)[-1]
        return F.interpolate(self.head(self.pool(features)), x.shape[-2:], mode="bicubic", align_corners=False)


_tiny = partial(DeepLab, num_classes=3, width_mult=1 / 16, rates=(2, 3, 5))

ENTRIES = (
    ZooEntry("deeplab", partial(_tiny, dropout=0.0), (3, 3, 65, 73), True, DeepLab),
    ZooEntry("deeplab_dropout", partial(_tiny, dropout=0.3), (3, 3, 53, 61), True, DeepLab, stochastic=True),
    ZooEntry("pspnet", partial(PSPNet, num_classes=3, width_mult=1 / 16), (3, 3, 77, 63), True, PSPNet),
)
