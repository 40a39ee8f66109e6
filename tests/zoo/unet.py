"""U-Net, four ways: how it goes up, and what it does about skip connections of another size.

- ``ValidUNet``: unpadded convolutions, transposed convolutions up, skip connections cropped to the centre;
  the output is smaller than the image.  Smallest side: 44 for the tiny version, 188 for the full one.
- ``PaddedUNet``: padded convolutions; bilinear with ``align_corners=True``, or transposed convolutions;
  what comes up is padded to the skip connection.  Smallest side: 2 ** depth.
- ``ResizedUNet``: resized to the skip connection's size, whatever it is.  Smallest side: 1.
- ``MultipleUNet``: the image is padded to a multiple of 2 ** depth by reflection, the output cropped back;
  pixel shuffle goes up.  Smallest side: 4 for the tiny version, 8 for the full one (a reflection is shorter
  than what it reflects).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled

_WIDTHS = (64, 128, 256, 512, 1024)


def double_conv(in_channels: int, out_channels: int, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _scaled_widths(depth: int, width_mult: float) -> list[int]:
    return [scaled(c, width_mult) for c in _WIDTHS[: depth + 1]]


class ValidUNet(nn.Module):
    """As published: no padding and no norm anywhere."""

    def __init__(self, *, depth: int = 4, in_channels: int = 1, num_classes: int = 2, width_mult: float = 1.0) -> None:
        super().__init__()
        widths = _scaled_widths(depth, width_mult)
        self.down = nn.ModuleList()
        channels = in_channels
        for width in widths:
            self.down.append(self._convs(channels, width))
            channels = width
        self.upconv = nn.ModuleList()
        self.up = nn.ModuleList()
        for width in reversed(widths[:-1]):
            self.upconv.append(nn.ConvTranspose2d(channels, width, kernel_size=2, stride=2))
            self.up.append(self._convs(2 * width, width))
            channels = width
        self.head = nn.Conv2d(channels, num_classes, kernel_size=1)

    @staticmethod
    def _convs(in_channels: int, out_channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3),
            nn.ReLU(True),
            nn.Conv2d(out_channels, out_channels, 3),
            nn.ReLU(True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(x)
            if i < len(self.down) - 1:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for upconv, up in zip(self.upconv, self.up, strict=True):
            x = upconv(x)
            skip = center_crop(skips.pop(), x.shape[-2:])
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)


def center_crop(x: Tensor, size: Sequence[int]) -> Tensor:
    top = (x.shape[-2] - size[0]) // 2
    left = (x.shape[-1] - size[1]) // 2
    return x[..., top : top + size[0], left : left + size[1]]


class PaddedUNet(nn.Module):
    """The output has the image's size: an odd row or column is lost going down and padded going up."""

    def __init__(
        self,
        *,
        depth: int = 4,
        in_channels: int = 3,
        num_classes: int = 2,
        width_mult: float = 1.0,
        bilinear: bool = True,
    ) -> None:
        super().__init__()
        widths = _scaled_widths(depth, width_mult)
        self.inc = double_conv(in_channels, widths[0])
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), double_conv(before, after)) for before, after in pairwise(widths)
        )
        self.ups = nn.ModuleList()
        self.convs = nn.ModuleList()
        for below, width in pairwise(reversed(widths)):
            up: nn.Module
            if bilinear:
                up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            else:
                up = nn.ConvTranspose2d(below, below, kernel_size=2, stride=2)
            self.ups.append(up)
            self.convs.append(double_conv(below + width, width))
        self.outc = nn.Conv2d(widths[0], num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.inc(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        x = features[-1]
        for up, conv, skip in zip(self.ups, self.convs, features[-2::-1], strict=True):
            x = up(x)
            dy = skip.size()[2] - x.size()[2]
            dx = skip.size()[3] - x.size()[3]
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = conv(torch.cat([skip, x], dim=1))
        return self.outc(x)


class ResizedUNet(nn.Module):
    """Strided convolutions down, a bilinear resize to the skip connection's size up, and a sum, not a cat."""

    def __init__(self, *, depth: int = 4, in_channels: int = 3, num_classes: int = 2, width_mult: float = 1.0) -> None:
        super().__init__()
        widths = _scaled_widths(depth, width_mult)
        self.inc = double_conv(in_channels, widths[0])
        pairs = list(pairwise(widths))
        self.strided = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.down = nn.ModuleList(double_conv(b, b) for _, b in pairs)
        self.squeeze = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in reversed(pairs))
        self.up = nn.ModuleList(double_conv(a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        for strided, down in zip(self.strided, self.down, strict=True):
            skips.append(down(F.elu(strided(skips[-1]))))
        y = skips.pop()
        for squeeze, up in zip(self.squeeze, self.up, strict=True):
            skip = skips.pop()
            y = squeeze(y)
            if y.shape[2:] != skip.shape[2:]:
                y = F.interpolate(y, size=skip.shape[2:], mode="bilinear", align_corners=False)
            y = up(y + skip)
        return self.head(y)


class MultipleUNet(nn.Module):
    """Pads the image once so that every level halves evenly, and crops the output back."""

    def __init__(self, *, depth: int = 4, in_channels: int = 3, num_classes: int = 2, width_mult: float = 1.0) -> None:
        super().__init__()
        widths = _scaled_widths(depth, width_mult)
        self.multiple = 2**depth
        self.encoders = nn.ModuleList(double_conv(a, b) for a, b in pairwise([in_channels, *widths]))
        self.shuffles = nn.ModuleList()
        self.decoders = nn.ModuleList()
        for below, width in pairwise(reversed(widths)):
            self.shuffles.append(nn.Sequential(nn.Conv2d(below, 4 * width, 1), nn.PixelShuffle(2)))
            self.decoders.append(double_conv(2 * width, width))
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        bottom, right = -height % self.multiple, -width % self.multiple
        top, left = bottom // 2, right // 2
        x = F.pad(x, (left, right - left, top, bottom - top), mode="reflect")
        skips: list[Tensor] = []
        for level, encoder in enumerate(self.encoders):
            if level:
                x = F.avg_pool2d(x, 2)
            x = encoder(x)
            skips.append(x)
        skips.pop()
        for shuffle, decoder in zip(self.shuffles, self.decoders, strict=True):
            x = decoder(torch.cat((shuffle(x), skips.pop()), 1))
        return self.head(x)[:, :, top : top + height, left : left + width]


_tiny: dict[str, Any] = {"depth": 3, "num_classes": 3, "width_mult": 1 / 16}

ENTRIES = (
    ZooEntry(
        "unet_valid",
        partial(ValidUNet, depth=2, in_channels=3, num_classes=3, width_mult=1 / 16),
        (2, 3, 61, 73),
        True,
        ValidUNet,
        min_size=44,
    ),
    ZooEntry("unet_bilinear", partial(PaddedUNet, **_tiny), (2, 3, 53, 47), True, PaddedUNet, min_size=8),
    ZooEntry(
        "unet_transposed",
        partial(PaddedUNet, bilinear=False, **_tiny),
        (2, 3, 43, 59),
        True,
        partial(PaddedUNet, bilinear=False),
        min_size=8,
    ),
    ZooEntry("unet_resized", partial(ResizedUNet, **_tiny), (2, 3, 47, 61), True, ResizedUNet),
    ZooEntry("unet_multiple", partial(MultipleUNet, **_tiny), (2, 3, 45, 67), True, MultipleUNet, min_size=4),
)
