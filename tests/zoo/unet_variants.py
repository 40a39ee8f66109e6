"""U-Nets with denser graphs: nested (U-Net++) and with attention gates on the skip connections.

Smallest side of the tiny versions: 8 nested, 5 with gates.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .unet import double_conv
from .widths import scaled


class NestedUNet(nn.Module):
    """Node (i, j) reads all nodes (i, <j) and, upsampled, node (i + 1, j - 1)."""

    def __init__(
        self,
        *,
        depth: int = 4,
        in_channels: int = 3,
        num_classes: int = 2,
        width_mult: float = 1.0,
        deep_supervision: bool = False,
    ) -> None:
        super().__init__()
        widths = [scaled(32 * 2**i, width_mult) for i in range(depth + 1)]
        self.depth = depth
        self.nodes = nn.ModuleDict()
        for i, width in enumerate(widths):
            self.nodes[f"0_{i}"] = double_conv(widths[i - 1] if i else in_channels, width)
        for j in range(1, depth + 1):
            for i in range(depth + 1 - j):
                self.nodes[f"{j}_{i}"] = double_conv(widths[i] * j + widths[i + 1], widths[i])
        heads = range(1, depth + 1) if deep_supervision else (depth,)
        self.heads = nn.ModuleDict({str(j): nn.Conv2d(widths[0], num_classes, 1) for j in heads})

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        rows: list[list[Tensor]] = []
        for i in range(self.depth + 1):
            x = self.nodes[f"0_{i}"](x if i == 0 else F.max_pool2d(x, 2, 2))
            rows.append([x])
        for j in range(1, self.depth + 1):
            for i in range(self.depth + 1 - j):
                size = rows[i][0].shape[-2:]
                below = F.interpolate(rows[i + 1][j - 1], size, mode="bilinear", align_corners=True)
                rows[i].append(self.nodes[f"{j}_{i}"](torch.cat([*rows[i], below], 1)))
        outputs = {name: head(rows[0][int(name)]) for name, head in self.heads.items()}
        return outputs if len(outputs) > 1 else outputs[str(self.depth)]


class AttentionGate(nn.Module):
    """Weighs the skip connection by a map computed at the coarser level and upsampled."""

    def __init__(self, skip_channels: int, gate_channels: int) -> None:
        super().__init__()
        hidden = max(1, skip_channels // 2)
        self.theta = nn.Conv2d(skip_channels, hidden, kernel_size=2, stride=2, bias=False)
        self.phi = nn.Conv2d(gate_channels, hidden, kernel_size=1)
        self.psi = nn.Conv2d(hidden, 1, kernel_size=1)

    def forward(self, skip: Tensor, gate: Tensor) -> Tensor:
        theta = self.theta(skip)
        phi = F.interpolate(self.phi(gate), size=theta.shape[2:], mode="bilinear", align_corners=False)
        weights = torch.sigmoid(self.psi(F.relu(theta + phi, inplace=True)))
        return skip * F.interpolate(weights, size=skip.shape[2:], mode="bilinear", align_corners=False)


class AttentionUNet(nn.Module):
    def __init__(self, *, depth: int = 4, in_channels: int = 3, num_classes: int = 2, width_mult: float = 1.0) -> None:
        super().__init__()
        widths = [scaled(64 * 2**i, width_mult) for i in range(depth + 1)]
        self.encoders = nn.ModuleList(double_conv(a, b) for a, b in pairwise([in_channels, *widths]))
        pairs = list(zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.gates = nn.ModuleList(AttentionGate(width, below) for width, below in pairs)
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(below, width, 3, stride=2, padding=1, bias=False) for width, below in pairs
        )
        self.decoders = nn.ModuleList(double_conv(2 * width, width) for width, _ in pairs)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = skips.pop()
        for gate, up, decoder in zip(self.gates, self.ups, self.decoders, strict=True):
            skip = skips.pop()
            gated = gate(skip, x)
            # The output padding that gives back the skip connection's size, odd or even.
            x = up(x, output_size=skip.shape[-2:])
            x = decoder(torch.cat((gated, x), dim=1))
        return self.head(x)


_tiny: dict[str, Any] = {"depth": 3, "num_classes": 3, "width_mult": 1 / 16}

ENTRIES = (
    ZooEntry("unet_nested", partial(NestedUNet, **_tiny), (2, 3, 41, 53), True, NestedUNet, min_size=8),
    ZooEntry("unet_attention", partial(AttentionUNet, **_tiny), (2, 3, 49, 37), True, AttentionUNet, min_size=5),
)

STRUCTURED = (
    ZooEntry(
        "unet_nested_supervised",
        partial(NestedUNet, deep_supervision=True, **_tiny),
        (2, 3, 37, 43),
        True,
        partial(NestedUNet, deep_supervision=True),
        min_size=8,
    ),
)
