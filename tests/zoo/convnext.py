"""ConvNeXt and ConvNeXt V2: 7x7 depthwise, LayerNorm over channels, linear layers channels-last.

V1 scales each block's branch (layer scale); V2 has global response norm, a norm over all positions, instead.
Smallest side: 32 (patchified stem of four, three halvings that do not pad).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth: drops the whole branch of a sample."""
    if rate == 0.0 or not training:
        return x
    keep = 1 - rate
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = x.new_empty(shape).bernoulli_(keep)
    if keep > 0.0:
        mask.div_(keep)
    return x * mask


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of a channels-first map, written out by hand."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GlobalResponseNorm(nn.Module):
    """On a channels-last map: each channel's norm over all positions, against the mean over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, 1, channels))
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, channels))

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        response = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * response) + self.beta + x


class Block(nn.Module):
    def __init__(self, channels: int, drop_rate: float, layer_scale: float | None) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, kernel_size=7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.grn = GlobalResponseNorm(4 * channels) if layer_scale is None else None
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = None if layer_scale is None else nn.Parameter(layer_scale * torch.ones(channels))
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.pwconv1(self.norm(x))
        x = F.gelu(x)
        if self.grn is not None:
            x = self.grn(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + drop_path(x, self.drop_rate, self.training)


class ConvNeXt(nn.Module):
    """``layer_scale=None`` is V2."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        drop_rate: float = 0.0,
        layer_scale: float | None = 1e-6,
    ) -> None:
        super().__init__()
        widths = [scaled(c, width_mult) for c in (96, 192, 384, 768)]
        self.downsample = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(in_channels, widths[0], 4, 4), ChannelNorm(widths[0]))]
        )
        for before, after in pairwise(widths):
            self.downsample.append(nn.Sequential(ChannelNorm(before), nn.Conv2d(before, after, 2, stride=2)))
        total = sum(depths)
        rates = iter(drop_rate * i / max(1, total - 1) for i in range(total))
        self.stages = nn.ModuleList(
            nn.Sequential(*(Block(width, next(rates), layer_scale) for _ in range(depth)))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = self.downsample[i](x)
            x = self.stages[i](x)
        return self.head(self.norm(x.mean([-2, -1])))


convnext_v2 = partial(ConvNeXt, layer_scale=None)
_tiny = partial(ConvNeXt, (1, 1, 2, 1), num_classes=4, width_mult=1 / 12)

ENTRIES = (
    # The published layer scale of 1e-6 would make every block's gradient vanish beside the head's.
    ZooEntry("convnext_tiny", partial(_tiny, layer_scale=0.5), (2, 3, 101, 131), False, ConvNeXt, min_size=32),
    ZooEntry("convnext_v2_tiny", partial(_tiny, layer_scale=None), (2, 3, 127, 97), False, convnext_v2, min_size=32),
    ZooEntry(
        "convnext_tiny_drop_path",
        partial(_tiny, layer_scale=0.5, drop_rate=0.4),
        (3, 3, 83, 71),
        False,
        partial(ConvNeXt, drop_rate=0.1),
        stochastic=True,
        min_size=32,
    ),
)
