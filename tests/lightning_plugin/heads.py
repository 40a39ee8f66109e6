"""Heads over the features of a slide's patches that attend: a plain transformer, and one with Nyström attention.

Written from their papers; the layers of Nyström attention are the application's. TransMIL (Shao et al., 2021) puts two
of them around a convolution over tokens laid out as a square.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wsi_trainer.models.heads import NystromAttention


class TransformerHead(nn.Module):
    """A class token that attends, with all features, to all features; ``(K, D)`` to logits."""

    def __init__(self, features: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, width)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token, self.project(x).unsqueeze(0)], 1)
        return self.head(self.layers(tokens)[:, 0])  # type: ignore[no-any-return]


class Square(nn.Module):
    """Three convolutions over the tokens, laid out as a square, and the tokens themselves; the class token passes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, groups=width) for k in (7, 5, 3))

    def forward(self, x: Tensor, side: int) -> Tensor:
        token, rest = x[:, :1], x[:, 1:]
        square = rest.transpose(1, 2).reshape(len(x), -1, side, side)
        made = square + sum(conv(square) for conv in self.convs)
        return torch.cat([token, made.flatten(2).transpose(1, 2)], 1)


class TransMIL(nn.Module):
    """Features ``(K, D)`` to logits; the first ones are repeated until they fill a square."""

    def __init__(self, features: int, width: int, heads: int, landmarks: int, kernel: int = 33) -> None:
        super().__init__()
        self.project = nn.Linear(features, width)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend = nn.ModuleList(NystromAttention(width, heads, landmarks, kernel) for _ in range(2))
        self.square = Square(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.project(x)).unsqueeze(0)
        side = math.ceil(math.sqrt(x.shape[1]))
        x = torch.cat([self.token, x, x[:, : side * side - x.shape[1]]], 1)
        x = x + self.attend[0](self.norms[0](x))
        x = self.square(x, side)
        x = x + self.attend[1](self.norms[1](x))
        return self.head(self.norms[2](x[:, 0]))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """Patches ``(K, C, H, W)``, a linear map of each, and a head over them all."""

    def __init__(self, channels: int, side: int, features: int, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(channels, features, side), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).flatten(1))  # type: ignore[no-any-return]
