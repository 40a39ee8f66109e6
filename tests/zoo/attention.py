"""Attention inside a convolutional network: by channel, by position, and between all pairs of positions.

Smallest side: 1 with a batch of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


def of_timm(name: str, channels: int, **how: Any) -> nn.Module:
    """An attention layer of timm's."""
    import tests.torchvision_stub  # noqa: F401

    return import_module("timm.layers").create_attn(name, channels, **how)  # type: ignore[no-any-return]


class CoordinateAttention(nn.Module):
    """Gates from the mean along each row and along each column."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(2, channels // 4)
        self.squeeze = nn.Conv2d(channels, hidden, 1)
        self.bn = nn.BatchNorm2d(hidden)
        self.gate_h = nn.Conv2d(hidden, channels, 1)
        self.gate_w = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows = x.mean(3, keepdim=True)
        columns = x.mean(2, keepdim=True).permute(0, 1, 3, 2)
        y = F.hardswish(self.bn(self.squeeze(torch.cat([rows, columns], dim=2))))
        y_h, y_w = torch.split(y, [height, width], dim=2)
        return x * self.gate_h(y_h).sigmoid() * self.gate_w(y_w.permute(0, 1, 3, 2)).sigmoid()


class SelfAttention(nn.Module):
    """A non-local block: every position attends to every other, which no rule can tile."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(x).flatten(2).chunk(3, dim=1)
        weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(channels), dim=-1)
        mixed = (v @ weights.transpose(1, 2)).reshape(batch, channels, height, width)
        return x + self.out(mixed)


class AttentionNet(nn.Module):
    """A small residual network with one attention module after each stage."""

    def __init__(
        self,
        attention: Callable[[int], nn.Module],
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        width_mult: float = 1.0,
    ) -> None:
        super().__init__()
        channels = scaled(64, width_mult)
        self.stem = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.convs = nn.ModuleList()
        self.attentions = nn.ModuleList()
        for _ in range(2):
            self.convs.append(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1))
            self.attentions.append(attention(2 * channels))
            channels *= 2
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for conv, attention in zip(self.convs, self.attentions, strict=True):
            x = F.relu(conv(x))
            x = F.relu(attention(x) + x)
        return self.fc(x.mean(dim=-1).mean(dim=-1))


def _entry(name: str, attention: Callable[[int], nn.Module], shape: tuple[int, ...]) -> ZooEntry:
    tiny = partial(AttentionNet, attention, num_classes=4, width_mult=1 / 16)
    return ZooEntry(name, tiny, shape, False, partial(AttentionNet, attention))


ENTRIES: tuple[ZooEntry, ...] = (
    _entry("attention_coordinate", CoordinateAttention, (2, 3, 61, 79)),
    _entry("attention_self", SelfAttention, (2, 3, 43, 53)),
)
if find_spec("timm"):
    ENTRIES += (
        _entry("attention_cbam", partial(of_timm, "cbam", rd_channels=2), (2, 3, 59, 71)),
        _entry("attention_eca", partial(of_timm, "eca"), (2, 3, 67, 53)),
    )
