"""A slide that knows where it is background."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin import TileSource
from lightning_plugin.boxes import Box


@dataclass(eq=False)
class Background(TileSource):
    """A slide that is background but for a piece of tissue, and knows where."""

    tensor: Tensor
    tissue: Box
    value: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        return self.tensor[(..., *(slice(lo, hi) for lo, hi in box.intervals()))].clone()

    def constant(self, box: Box) -> Tensor | None:
        if not box.intersect(self.tissue).empty:
            return None
        return torch.full((self.shape[1],), self.value, dtype=self.dtype)
