"""A plain transformer over patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wsi_trainer.models.bag_heads.tokens import as_tokens, refuse_counts
from wsi_trainer.models.heads import Pooling


class TransformerPooling(Pooling):
    """A class token that attends, with all patches, to all patches; it knows nothing of where they lie."""

    def __init__(self, channels: int, width: int = 512, heads: int = 8, layers: int = 2, dropout: float = 0.0) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            heads: Heads of the attention.
            layers: How many layers, normalised before attention and before their own network of `4 * width`.
            dropout: Dropout in the layers.
        """
        super().__init__(channels)
        if width % heads:
            raise ValueError(f"width is {width}; it must be a multiple of heads, {heads}")
        self.out_channels = width
        self.project = nn.Linear(channels, width)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        refuse_counts(self, counts)
        tokens = self.project(as_tokens(features))
        return self.layers(torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1))[:, 0]
