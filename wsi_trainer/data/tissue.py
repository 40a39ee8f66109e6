"""Which positions of a network's map have tissue: a map that is read box by box, like the slide itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.slide.augment import AS_IT_IS, GLASS, Augmentation, Augmented
from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import BlockView

TISSUE = 0


def tissue_of(image: BlockView) -> TissueMask:
    """The tissue of an image; an error where there is none."""
    mask = image.tissue()
    if not mask.mask.any():
        raise SlideError(
            image.slide.path,
            "no tissue was found on it, so there is nothing to pool over; use pool_over and statistics: slide",
        )
    return mask


class _Mask(TileSource):
    """A tissue mask, pixel for pixel; glass has the value of what an augmented slide is filled with."""

    dtype = torch.uint8

    def __init__(self, mask: TissueMask, size: tuple[int, int]) -> None:
        self.mask, self.shape = mask, (1, 1, *size)

    def read(self, box: Box) -> Tensor:
        covered = self.mask.cover(*box.lo, *box.extent)
        return torch.from_numpy(np.where(covered, np.uint8(TISSUE), np.uint8(GLASS)))[None, None]

    def constant(self, box: Box) -> Tensor | None:
        return None if self.mask.any_in(*box.lo, *box.extent) else torch.full((1,), GLASS, dtype=self.dtype)


class TissueMap(TileSource):
    """1 for each position of a map that stands for at least one pixel with tissue, else 0; shape (1, 1, h, w).

    A position stands for the `stride` × `stride` pixels from its place times the stride on.

    Args:
        mask: The tissue of an image.
        size: Height and width of the image.
        stride: Pixels of the image along one position.
        how: How the slide is shown.
    """

    dtype = torch.uint8

    def __init__(self, mask: TissueMask, size: tuple[int, int], stride: int, how: Augmentation = AS_IT_IS) -> None:
        self._pixels, self.stride = Augmented(_Mask(mask, size), how), stride
        height, width = self._pixels.shape[2:]
        self.shape = (1, 1, -(-height // stride), -(-width // stride))

    def read(self, box: Box) -> Tensor:
        inside = self._inside(box)
        tissue = (self._pixels.load(inside) != GLASS).float()
        rows, columns = box.extent
        missing = (columns * self.stride - inside.extent[1], rows * self.stride - inside.extent[0])
        padded = torch.nn.functional.pad(tissue, (0, missing[0], 0, missing[1]))
        return torch.nn.functional.max_pool2d(padded, self.stride).to(self.dtype)

    def constant(self, box: Box) -> Tensor | None:
        value = self._pixels.constant(self._inside(box))
        return None if value is None or int(value[0]) != GLASS else torch.zeros(1, dtype=self.dtype)

    def _inside(self, box: Box) -> Box:
        """The pixels that the positions of a box stand for."""
        size = self._pixels.shape[2:]
        lo = tuple(at * self.stride for at in box.lo)
        return Box(lo, tuple(min(at * self.stride, end) for at, end in zip(box.hi, size)))
