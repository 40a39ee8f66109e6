"""BiSeNet: a fine path and a coarse one, gated by global means and joined.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .resnet import ResNet, resnet18
from .widths import scaled


def _unit(in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class AttentionRefinement(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _unit(in_channels, out_channels)
        self.gate = nn.Conv2d(out_channels, out_channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        feature = self.conv(x)
        gate = F.avg_pool2d(feature, feature.size()[2:])
        gate = self.bn(self.gate(gate)).sigmoid()
        return torch.mul(feature, gate)


class FeatureFusion(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _unit(in_channels, out_channels, 1)
        hidden = max(1, out_channels // 4)
        self.fc1 = nn.Linear(out_channels, hidden)
        self.fc2 = nn.Linear(hidden, out_channels)

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        feature = self.conv(torch.cat([fine, coarse], dim=1))
        gate = self.fc2(F.relu(self.fc1(feature.mean((2, 3))))).sigmoid()
        return torch.addcmul(feature, feature, gate[..., None, None])


class BiSeNet(nn.Module):
    def __init__(self, *, in_channels: int = 3, num_classes: int = 19, width_mult: float = 1.0) -> None:
        super().__init__()
        channels = scaled(128, width_mult)
        thin = scaled(64, width_mult)
        self.spatial = nn.Sequential(
            _unit(in_channels, thin, 7, 2),
            _unit(thin, thin, 3, 2),
            _unit(thin, thin, 3, 2),
            _unit(thin, channels, 1),
        )
        self.context: ResNet = resnet18(in_channels=in_channels, width_mult=width_mult)
        del self.context.avgpool, self.context.fc
        stages = self.context.stage_channels
        self.refine16 = AttentionRefinement(stages[2], channels)
        self.refine32 = AttentionRefinement(stages[3], channels)
        self.tail = _unit(stages[3], channels, 1)
        self.head16 = _unit(channels, channels)
        self.head32 = _unit(channels, channels)
        self.fusion = FeatureFusion(2 * channels, 2 * channels)
        self.out = nn.Conv2d(2 * channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, stage8, stage16, stage32 = self.context.forward_stages(x)
        tail = self.tail(torch.mean(stage32, dim=(2, 3), keepdim=True))
        y32 = self.refine32(stage32) + tail
        y16 = self.head32(F.interpolate(y32, stage16.shape[2:], mode="nearest"))
        y16 = y16 + self.refine16(stage16)
        y8 = self.head16(F.interpolate(y16, stage8.shape[2:], mode="nearest"))
        logits = self.out(self.fusion(self.spatial(x), y8))
        return F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=True)


ENTRIES = (ZooEntry("bisenet", partial(BiSeNet, num_classes=3, width_mult=1 / 16), (3, 3, 85, 91), True, BiSeNet),)
