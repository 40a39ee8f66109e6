"""V-Net: 5x5x5 kernels, residual levels, the image repeated over the channels, PReLU, whole-channel dropout.

Smallest side: 2 ** depth, 4 for the tiny version.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


class Residual(nn.Module):
    """``depth`` convolutions whose sum with ``shortcut`` is activated."""

    def __init__(self, in_channels: int, channels: int, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for i in range(depth):
            conv = nn.Conv3d(in_channels if i == 0 else channels, channels, kernel_size=5, padding=2)
            self.convs.append(nn.Sequential(conv, nn.BatchNorm3d(channels), nn.PReLU(channels)))
        self.activation = nn.PReLU(channels)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return self.activation(torch.add(x, shortcut))


class VNet(nn.Module):
    def __init__(
        self,
        *,
        depth: int = 4,
        in_channels: int = 1,
        num_classes: int = 2,
        width_mult: float = 1.0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        widths = [scaled(16 * 2**i, width_mult, divisor=max(2, in_channels)) for i in range(depth + 1)]
        self.in_conv = nn.Conv3d(in_channels, widths[0], 5, padding=2)
        self.in_norm = nn.BatchNorm3d(widths[0])
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Conv3d(a, b, kernel_size=2, stride=2) for a, b in pairs)
        self.encode = nn.ModuleList(Residual(b, b, min(i + 2, 3)) for i, (_, b) in enumerate(pairs))
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, kernel_size=2, stride=2) for a, b in reversed(pairs))
        self.decode = nn.ModuleList(Residual(2 * a, a, 2) for a, _ in reversed(pairs))
        self.dropout = nn.Dropout3d(dropout)
        self.head = nn.Conv3d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        repeats = self.in_conv.out_channels // self.in_conv.in_channels
        repeated = torch.cat([x] * repeats, dim=1)
        x = F.elu(self.in_norm(self.in_conv(x)) + repeated)
        skips = [x]
        for down, encode in zip(self.down, self.encode, strict=True):
            x = F.elu(down(x))
            x = encode(x, x)
            skips.append(x)
        x = skips.pop()
        for up, decode in zip(self.up, self.decode, strict=True):
            skip = skips.pop()
            x = up(x)
            depth, height, width = x.shape[2:]
            # An odd plane is lost on the way down: crop the skip connection, so the output is smaller too.
            skip = self.dropout(skip[:, :, :depth, :height, :width])
            x = decode(torch.cat((x, skip), 1), x)
        return self.head(x)


_tiny = partial(VNet, depth=2, width_mult=1 / 4)

ENTRIES = (
    ZooEntry("vnet", partial(_tiny, dropout=0.0), (2, 1, 15, 19, 13), True, VNet, min_size=4),
    ZooEntry(
        "vnet_dropout",
        partial(_tiny, dropout=0.5),
        (2, 1, 13, 11, 17),
        True,
        VNet,
        stochastic=True,
        min_size=4,
    ),
)
