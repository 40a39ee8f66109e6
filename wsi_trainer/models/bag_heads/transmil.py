"""TransMIL: patches in a square, between two layers of Nyström attention (Shao et al., 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.bag_heads.nystrom import NystromAttention
from wsi_trainer.models.bag_heads.tokens import as_tokens, refuse_counts
from wsi_trainer.models.heads import Pooling


class TransMILPooling(Pooling):
    """TransMIL's class token.

    Patches are projected, and the first are repeated until they fill a square; a layer of Nyström attention, three
    convolutions of 7, 5 and 3 over the square beside the patches themselves, another layer, and the class token.
    Patches stand in the square in the order in which they come.
    """

    def __init__(
        self, channels: int, width: int = 512, heads: int = 8, landmarks: int = 256, dropout: float = 0.1
    ) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            heads: Heads of the attention.
            landmarks: Landmarks of the attention; the paper takes the half of width.
            dropout: Dropout of what attention returns.
        """
        super().__init__(channels)
        if width % heads:
            raise ValueError(f"width is {width}; it must be a multiple of heads, {heads}")
        self.out_channels = width
        self.project = nn.Linear(channels, width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend = nn.ModuleList(NystromAttention(width, heads, landmarks) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, groups=width) for k in (7, 5, 3))
        self.drop = nn.Dropout(dropout)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        refuse_counts(self, counts)
        x = functional.relu(self.project(as_tokens(features)))
        side = math.isqrt(x.shape[1] - 1) + 1
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat([token, x, x[:, : side * side - x.shape[1]]], 1)
        x = x + self.drop(self.attend[0](self.norms[0](x)))
        x = self._mixed(x, side)
        x = x + self.drop(self.attend[1](self.norms[1](x)))
        return self.norms[2](x[:, 0])

    def _mixed(self, x: Tensor, side: int) -> Tensor:
        """The convolutions over the square; the class token passes."""
        square = x[:, 1:].transpose(1, 2).reshape(len(x), -1, side, side)
        made = square + sum(convolution(square) for convolution in self.convolutions)
        return torch.cat([x[:, :1], made.flatten(2).transpose(1, 2)], 1)
