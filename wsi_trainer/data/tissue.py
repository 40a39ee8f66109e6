"""Which positions of a network's map have tissue: a map that is read box by box, like the slide itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.data.thumbnail import shrunk
from wsi_trainer.foreign.arrays import open_zarr_array
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.overview import mask_scale
from wsi_trainer.slides.source import SlideSource
from wsi_trainer.slides.tissue import LABEL, TissueMask, find_tissue

GLASS, TISSUE = 255, 0
"""Glass has the value that an augmented slide is filled with where it is shifted."""
MOST_COARSE = 2048
"""Longest side of the coarse copy of a slide that does not say how large its pixels are."""


@dataclass(frozen=True, eq=False)
class MaskSource:
    """A tissue mask, pixel for pixel, as a `TileSource` that can be augmented like the slide."""

    mask: TissueMask
    shape: tuple[int, ...]
    dtype = torch.uint8

    def read(self, box: Box) -> Tensor:
        covered = self.mask.cover(*box.lo, *box.extent)
        return torch.from_numpy(np.where(covered, np.uint8(TISSUE), np.uint8(GLASS)))[None, None]

    def constant(self, box: Box) -> Tensor | None:
        tissue = self.mask.any_in(*box.lo, *box.extent)
        return None if tissue else torch.full((1,), GLASS, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class TissueMap:
    """1 for each position of a map that stands for at least one pixel with tissue, else 0; shape (1, 1, h, w).

    A position stands for the `stride` × `stride` pixels from its place times the stride on.
    """

    pixels: TileSource
    stride: int
    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        height, width = self.pixels.shape[2:]
        return (1, 1, -(-height // self.stride), -(-width // self.stride))

    def read(self, box: Box) -> Tensor:
        inside = self._pixels(box)
        tissue = (self.pixels.read(inside) != GLASS).float()
        rows, columns = box.extent
        missing = (columns * self.stride - inside.extent[1], rows * self.stride - inside.extent[0])
        padded = torch.nn.functional.pad(tissue, (0, missing[0], 0, missing[1]))
        return torch.nn.functional.max_pool2d(padded, self.stride).to(self.dtype)

    def constant(self, box: Box) -> Tensor | None:
        value = self.pixels.constant(self._pixels(box))
        return None if value is None or int(value[0]) != GLASS else torch.zeros(1, dtype=self.dtype)

    def _pixels(self, box: Box) -> Box:
        size = self.pixels.shape[2:]
        lo = tuple(at * self.stride for at in box.lo)
        return Box(lo, tuple(min(at * self.stride, end) for at, end in zip(box.hi, size)))


def mask_of(path: Path, image: SlideSource) -> TissueMask:
    """The tissue of an image of a slide: what `preprocess` stored with it, or else found on a coarse copy."""
    scale = _scale(image)
    mask = _stored(path, image, scale)
    return find_tissue(_coarse(path, image, scale), scale) if mask is None else mask


def tissue_of(path: Path, image: SlideSource) -> MaskSource:
    """The tissue of an image of a slide, as a source; an error where there is none."""
    mask = mask_of(path, image)
    if not mask.mask.any():
        raise SlideError(
            path, "no tissue was found on it, so there is nothing to pool over; use pool_over and statistics: slide"
        )
    return MaskSource(mask, (1, 1, *image.shape[2:]))


def _scale(image: SlideSource) -> int:
    """Pixels of the image along one of its mask."""
    if image.mpp is not None:
        return mask_scale(image.mpp)
    scale = 1
    while max(image.shape[2:]) > MOST_COARSE * scale:
        scale *= 2
    return scale


def _stored(path: Path, image: SlideSource, scale: int) -> TissueMask | None:
    """The label of a store at the level whose pixels are those of the mask, or the coarsest below."""
    folder = path / "labels" / LABEL
    if not (folder / "zarr.json").is_file():
        return None
    levels = sorted(int(level.name) for level in folder.iterdir() if level.name.isdigit())
    full = open_zarr_array(folder / str(levels[0])).shape
    shrink = round(full[0] / image.shape[2])  # how much the image itself is shrunk
    for level in reversed(levels):
        if 2**level % shrink == 0 and 2**level // shrink <= scale:
            array = open_zarr_array(folder / str(level))
            return TissueMask(np.asarray(array[:]) > 0, 2**level // shrink)
    return None


def _coarse(path: Path, image: SlideSource, scale: int) -> np.ndarray:
    """A copy of the image, (h, w, 3), shrunk by the scale: from a coarser level, or box by box."""
    if image.mpp is not None and scale > 1:
        try:
            coarse = SlideSource(path, mpp=scale * sum(image.mpp) / 2)
            return _pixels(coarse.read(Box.whole(coarse.shape[2:])))
        except SlideError:  # a store without such a level: shrink the image itself
            pass
    return shrunk(image, scale)


def _pixels(image: Tensor) -> np.ndarray:
    return image[0].permute(1, 2, 0).numpy()
