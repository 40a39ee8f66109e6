"""Inception-v3: parallel branches with 1x7 and 7x1 kernels, unpadded strides and pools beside them.

Smallest side: 75 (the stem and the two reductions do not pad).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


class ConvBNReLU(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed35(nn.Module):
    """1x1, 5x5, double 3x3 and an average pool, all at stride one."""

    def __init__(self, channels: int, pool_channels: int, w: float) -> None:
        super().__init__()
        c48, c64, c96 = scaled(48, w), scaled(64, w), scaled(96, w)
        self.branch1x1 = ConvBNReLU(channels, c64, 1)
        self.branch5x5 = nn.Sequential(ConvBNReLU(channels, c48, 1), ConvBNReLU(c48, c64, 5, padding=2))
        self.branch3x3 = nn.Sequential(
            ConvBNReLU(channels, c64, 1),
            ConvBNReLU(c64, c96, 3, padding=1),
            ConvBNReLU(c96, c96, 3, padding=1),
        )
        self.branch_pool = ConvBNReLU(channels, scaled(pool_channels, w), 1)
        self.out_channels = 2 * c64 + c96 + scaled(pool_channels, w)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return torch.cat([self.branch1x1(x), self.branch5x5(x), self.branch3x3(x), self.branch_pool(pooled)], 1)


class Reduce17(nn.Module):
    """From the 35x35 grid to 17x17: two strided branches beside a bare max pool."""

    def __init__(self, channels: int, w: float) -> None:
        super().__init__()
        c64, c96, c384 = scaled(64, w), scaled(96, w), scaled(384, w)
        self.branch3x3 = ConvBNReLU(channels, c384, 3, stride=2)
        self.branch_double = nn.Sequential(
            ConvBNReLU(channels, c64, 1),
            ConvBNReLU(c64, c96, 3, padding=1),
            ConvBNReLU(c96, c96, 3, stride=2),
        )
        self.out_channels = c384 + c96 + channels

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat((self.branch3x3(x), self.branch_double(x), pooled), dim=1)


class Mixed17(nn.Module):
    """7x7 kernels factored into 1x7 and 7x1."""

    def __init__(self, channels: int, inner: int, w: float) -> None:
        super().__init__()
        c, c192 = scaled(inner, w), scaled(192, w)
        row = partial(ConvBNReLU, kernel=(1, 7), padding=(0, 3))
        column = partial(ConvBNReLU, kernel=(7, 1), padding=(3, 0))
        self.branch1x1 = ConvBNReLU(channels, c192, 1)
        self.branch7x7 = nn.Sequential(ConvBNReLU(channels, c, 1), row(c, c), column(c, c192))
        self.branch_double = nn.Sequential(
            ConvBNReLU(channels, c, 1),
            column(c, c),
            row(c, c),
            column(c, c),
            row(c, c192),
        )
        self.branch_pool = ConvBNReLU(channels, c192, 1)
        self.out_channels = 4 * c192

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.branch1x1(x), self.branch7x7(x), self.branch_double(x), pooled], 1)


class Reduce8(nn.Module):
    """From 17x17 to 8x8."""

    def __init__(self, channels: int, w: float) -> None:
        super().__init__()
        c192, c320 = scaled(192, w), scaled(320, w)
        self.branch3x3 = nn.Sequential(ConvBNReLU(channels, c192, 1), ConvBNReLU(c192, c320, 3, stride=2))
        self.branch7x7 = nn.Sequential(
            ConvBNReLU(channels, c192, 1),
            ConvBNReLU(c192, c192, (1, 7), padding=(0, 3)),
            ConvBNReLU(c192, c192, (7, 1), padding=(3, 0)),
            ConvBNReLU(c192, c192, 3, stride=2),
        )
        self.pool = nn.MaxPool2d(3, stride=2)
        self.out_channels = c320 + c192 + channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in (self.branch3x3, self.branch7x7, self.pool)], 1)


class Mixed8(nn.Module):
    """Branches that fork a second time and concatenate within the concatenation."""

    def __init__(self, channels: int, w: float) -> None:
        super().__init__()
        c192, c320, c384, c448 = (scaled(c, w) for c in (192, 320, 384, 448))
        self.branch1x1 = ConvBNReLU(channels, c320, 1)
        self.stem3x3 = ConvBNReLU(channels, c384, 1)
        self.row3x3 = ConvBNReLU(c384, c384, (1, 3), padding=(0, 1))
        self.column3x3 = ConvBNReLU(c384, c384, (3, 1), padding=(1, 0))
        self.stem_double = nn.Sequential(ConvBNReLU(channels, c448, 1), ConvBNReLU(c448, c384, 3, padding=1))
        self.row_double = ConvBNReLU(c384, c384, (1, 3), padding=(0, 1))
        self.column_double = ConvBNReLU(c384, c384, (3, 1), padding=(1, 0))
        self.branch_pool = ConvBNReLU(channels, c192, 1)
        self.out_channels = c320 + 4 * c384 + c192

    def forward(self, x: Tensor) -> Tensor:
        single = self.stem3x3(x)
        single = torch.cat([self.row3x3(single), self.column3x3(single)], 1)
        double = self.stem_double(x)
        double = torch.cat([self.row_double(double), self.column_double(double)], 1)
        pooled = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), single, double, pooled], 1)


class AuxiliaryHead(nn.Module):
    def __init__(self, channels: int, num_classes: int, w: float) -> None:
        super().__init__()
        self.conv0 = ConvBNReLU(channels, scaled(128, w), 1)
        self.conv1 = ConvBNReLU(scaled(128, w), scaled(768, w), 5)
        self.fc = nn.Linear(scaled(768, w), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, kernel_size=5, stride=3)
        x = self.conv1(self.conv0(x))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(torch.flatten(x, 1))


class InceptionV3(nn.Module):
    """With ``auxiliary``, train mode returns (logits, auxiliary logits) and needs a side of 299 or more."""

    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        dropout: float = 0.5,
        auxiliary: bool = False,
    ) -> None:
        super().__init__()
        w = width_mult
        c32, c64, c80, c192 = (scaled(c, w) for c in (32, 64, 80, 192))
        self.stem = nn.Sequential(
            ConvBNReLU(in_channels, c32, 3, stride=2),
            ConvBNReLU(c32, c32, 3),
            ConvBNReLU(c32, c64, 3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2),
            ConvBNReLU(c64, c80, 1),
            ConvBNReLU(c80, c192, 3),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.mixed = nn.ModuleList()
        channels = c192
        for pool_channels in (32, 64, 64):
            channels = self._append(Mixed35(channels, pool_channels, w))
        channels = self._append(Reduce17(channels, w))
        for inner in (128, 160, 160, 192):
            channels = self._append(Mixed17(channels, inner, w))
        self.auxiliary = AuxiliaryHead(channels, num_classes, w) if auxiliary else None
        self.auxiliary_after = len(self.mixed) - 1
        channels = self._append(Reduce8(channels, w))
        for _ in range(2):
            channels = self._append(Mixed8(channels, w))
        self.dropout = nn.Dropout(p=dropout)
        self.fc = nn.Linear(channels, num_classes)

    def _append(self, block: Mixed35 | Reduce17 | Mixed17 | Reduce8 | Mixed8) -> int:
        self.mixed.append(block)
        return block.out_channels

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        extra: Tensor | None = None
        for i, block in enumerate(self.mixed):
            x = block(x)
            if i == self.auxiliary_after and self.auxiliary is not None and self.training:
                extra = self.auxiliary(x)
        x = F.adaptive_avg_pool2d(x, 1)
        logits = self.fc(self.dropout(x).squeeze(-1).squeeze(-1))
        return logits if extra is None else (logits, extra)


_tiny = partial(InceptionV3, num_classes=4, width_mult=1 / 16, dropout=0.0)

ENTRIES = (ZooEntry("inception_v3", _tiny, (2, 3, 139, 127), False, InceptionV3, min_size=75),)

STRUCTURED = (
    ZooEntry(
        "inception_v3_auxiliary",
        partial(_tiny, auxiliary=True),
        (2, 3, 299, 311),
        False,
        partial(InceptionV3, auxiliary=True),
        min_size=299,
    ),
)
