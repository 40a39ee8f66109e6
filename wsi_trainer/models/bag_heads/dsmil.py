"""DSMIL: attention by the likeness to the most telling patch (Li, Li and Eliceiri, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wsi_trainer.models.heads import Pooling, attended, lowered


class DualStreamPooling(Pooling):
    """DSMIL's two streams, for each output of the task.

    The first scores each patch by itself, w·h; the patch with the highest score is the critical one, m. The second is
    a mean of V h over all patches, its weights the softmax of the products of queries, (Q h)·(Q hₘ). The vector of an
    output is that mean, and beside it the score of the critical patch: the last layer weighs the two, where the paper
    takes the half of each. Patches that share the highest score are critical together, in equal parts.
    """

    def __init__(self, channels: int, queries: int = 128) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            queries: Entries of a query.
        """
        super().__init__(channels)
        self.score = nn.Conv2d(channels, 1, 1)
        self.query = nn.Conv2d(channels, queries, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.out_channels = channels + 1

    def attach(self, outputs: int) -> None:
        self.branches = outputs
        self.out_channels *= outputs
        self.score = nn.Conv2d(self.score.in_channels, outputs, 1)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        scores = lowered(self.score(features), counts)
        queries, values = self.query(features), self.value(features)
        vectors = []
        for branch in range(self.branches):
            own = scores[:, branch : branch + 1]
            highest = own.amax(dim=(2, 3), keepdim=True)
            critical = (own == highest).to(queries.dtype)
            middle = (queries * critical).sum(dim=(2, 3), keepdim=True) / critical.sum(dim=(2, 3), keepdim=True)
            alike = lowered((queries * middle).sum(dim=1, keepdim=True), counts)
            vectors += [attended(values, alike), highest.flatten(1)]
        return torch.cat(vectors, dim=1)
