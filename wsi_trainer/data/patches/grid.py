"""Patches on a grid over an image, or over its tissue."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Positions

Numbers = NDArray[np.int64]


def over_slide(shape: tuple[int, int], size: int, stride: int) -> Positions:
    """The corners of all patches of a grid that lie whole in an image."""
    rows, columns = (np.arange(0, side - size + 1, stride, dtype=np.int32) for side in shape)
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def over_tissue(mask: TissueMask, shape: tuple[int, int], size: int, stride: int, share: float) -> Positions:
    """Those of the grid that hold tissue, and at least this share of it.

    Row by row of the grid, so that memory goes with what is found and not with the slide.
    """
    columns = np.arange(0, shape[1] - size + 1, stride)
    found = [np.empty((0, 2), np.int32)]
    for y in range(0, shape[0] - size + 1, stride):
        tissue = _tissue_in(mask, y, size, columns)
        taken = columns[(tissue > 0) & (tissue / size**2 >= share)]
        found.append(np.stack([np.full_like(taken, y), taken], axis=1).astype(np.int32))
    return np.concatenate(found)


def _tissue_in(mask: TissueMask, y: int, size: int, columns: Numbers) -> Numbers:
    """Pixels of tissue in each patch of a row of the grid, exactly: a patch may cut through pixels of the mask.

    Where the mask ends before the image, its last row and column go on, as everywhere.
    """
    scale, (height, width) = mask.scale, mask.mask.shape
    rows = np.arange(y // scale, (y + size - 1) // scale + 1)
    shares = np.minimum((rows + 1) * scale, y + size) - np.maximum(rows * scale, y)
    last = (int(columns[-1]) + size) // scale if len(columns) else 0
    profile = shares @ mask.mask[np.minimum(rows, height - 1)].astype(np.int64)  # pixels of each column of the mask
    profile = np.pad(profile, (0, max(0, last + 1 - width)), mode="edge")
    sums = np.concatenate([[0], np.cumsum(profile * scale)])

    def left_of(x: Numbers) -> Numbers:
        whole, rest = np.divmod(x, scale)
        return sums[whole] + profile[whole] * rest

    return left_of(columns + size) - left_of(columns)
