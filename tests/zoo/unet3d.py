"""3-D U-Net with GroupNorm or InstanceNorm, going up by transposed convolution or trilinearly.

Smallest side: 2 ** depth (4 for the tiny version), twice that with InstanceNorm, which needs two positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

NormFactory = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    groups = 8 if channels % 8 == 0 else 2
    return nn.GroupNorm(groups, channels)


class Level(nn.Module):
    """Norm, convolution, ReLU, twice, as volumetric networks order them."""

    def __init__(self, in_channels: int, out_channels: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = norm(out_channels)
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.01, inplace=True)
        return F.leaky_relu(self.norm2(self.conv2(x)), 0.01, inplace=True)


class UNet3D(nn.Module):
    def __init__(
        self,
        *,
        depth: int = 3,
        in_channels: int = 1,
        num_classes: int = 3,
        width_mult: float = 1.0,
        norm: NormFactory = group_norm,
        trilinear: bool = False,
    ) -> None:
        super().__init__()
        widths = [scaled(32 * 2**i, width_mult, divisor=2) for i in range(depth + 1)]
        self.encoders = nn.ModuleList(Level(a, b, norm) for a, b in pairwise([in_channels, *widths]))
        self.pool = nn.MaxPool3d(kernel_size=2)
        self.ups = nn.ModuleList()
        self.decoders = nn.ModuleList()
        for below, width in pairwise(reversed(widths)):
            up = nn.Conv3d(below, width, 1) if trilinear else nn.ConvTranspose3d(below, width, 2, stride=2)
            self.ups.append(up)
            self.decoders.append(Level(2 * width, width, norm))
        self.trilinear = trilinear
        self.head = nn.Conv3d(widths[0], num_classes, 1)

    def _match(self, x: Tensor, skip: Tensor) -> Tensor:
        size = skip.shape[2:]
        if self.trilinear:
            return F.interpolate(x, size=size, mode="trilinear", align_corners=False)
        pads: list[int] = []
        for have, want in zip(reversed(x.shape[2:]), reversed(size), strict=True):
            pads += [0, want - have]
        return F.pad(x, pads, mode="replicate") if any(pads) else x

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, encoder in enumerate(self.encoders):
            if i > 0:
                x = self.pool(x)
            x = encoder(x)
            skips.insert(0, x)
        for up, decoder, skip in zip(self.ups, self.decoders, skips[1:], strict=True):
            x = self._match(up(x), skip)
            x = decoder(torch.cat([skip, x], dim=1))
        return self.head(x)


_instance_norm = partial(nn.InstanceNorm3d, affine=True)
_tiny: dict[str, Any] = {"depth": 2, "width_mult": 1 / 8}

ENTRIES = (
    ZooEntry("unet3d_group", partial(UNet3D, **_tiny), (2, 1, 19, 23, 17), True, UNet3D, min_size=4),
    ZooEntry(
        "unet3d_instance",
        partial(UNet3D, norm=_instance_norm, trilinear=True, **_tiny),
        (1, 1, 17, 21, 25),
        True,
        partial(UNet3D, norm=_instance_norm, trilinear=True),
        min_size=8,
    ),
)
