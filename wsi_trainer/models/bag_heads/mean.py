"""The mean over patches, each passed through a small network before."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.heads import AveragePooling


class MeanMLP(AveragePooling):
    """The mean over the slide of max(0, W h + b): what attention has to beat."""

    def __init__(self, channels: int, hidden: int = 512, dropout: float = 0.0) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            hidden: Rows of W.
            dropout: Dropout of what is averaged.
        """
        super().__init__(channels)
        self.out_channels = hidden
        self.project = nn.Conv2d(channels, hidden, 1)
        self.drop = nn.Dropout(dropout)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return super().forward(self.drop(functional.relu(self.project(features))), counts)
