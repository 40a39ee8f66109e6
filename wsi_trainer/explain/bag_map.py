"""From one value for each patch of a bag to a map over the slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wsi_trainer.data import PatchConfig
from wsi_trainer.slide.views import Bag, Image, Positions


@dataclass(frozen=True, eq=False)
class BagPlaces:
    """Where the patches of a bag lie in the image that they were cut from."""

    image: Image
    positions: Positions
    size: int
    stride: int
    """Pixels of the image for one position of the map: from one patch of the grid to the next, or a patch where it has
    gaps, so that each patch covers the middle of one position at least.
    """

    @staticmethod
    def of(bag: Bag, patches: PatchConfig) -> BagPlaces:
        """Those of a slide's bag."""
        return BagPlaces(bag.whole(), bag.positions, bag.side, min(patches.step, patches.size))

    def paint(self, values: Tensor) -> Tensor:
        """The map, (rows, columns): the mean of the patches over the middle of each position, 0 where there is none."""
        rows, columns = (-(-side // self.stride) for side in self.image.shape[2:])
        total, count = np.zeros((rows, columns)), np.zeros((rows, columns))
        first = np.ceil(self.positions / self.stride - 0.5).astype(int)
        last = np.ceil((self.positions + self.size) / self.stride - 0.5).astype(int)
        for value, (top, left), (bottom, right) in zip(
            values.flatten().double().tolist(), np.maximum(first, 0).tolist(), last.tolist(), strict=True
        ):
            total[top:bottom, left:right] += value
            count[top:bottom, left:right] += 1
        return torch.from_numpy(np.divide(total, count, out=np.zeros_like(total), where=count > 0))
