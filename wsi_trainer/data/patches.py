"""Bags: the patches of a slide, on a grid over its tissue or from a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.data.positions import chosen_patches
from wsi_trainer.errors import AbsentResolution, SlideError, UserError
from wsi_trainer.io.display import clean
from wsi_trainer.slide.augment import Augmentation, Augmented, Augmenter, PatchAugmentations, moved
from wsi_trainer.slide.geometry import is_plausible
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Bag, Image, Positions, along_blocks


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Square patches of each slide, which are one bag to the network: every one of them is read in each step."""

    size: int = 224
    """Pixels along a side of a patch, as the encoder takes it."""
    mpp: float | Literal["own"] = 0.5
    """Micrometres per pixel of a patch; 0.5 is what is called 20x. A store's own level of it is taken as it is,
    else a finer one is filtered down; own takes the finest level as it is.
    """
    stride: int | None = None
    """Pixels from one patch to the next: less than `size` lets them overlap, more leaves gaps; null puts them side by
    side.
    """
    over: Literal["tissue", "slide"] = "tissue"
    """Which places of the grid are taken: those with tissue, or all."""
    min_tissue: float = 0.25
    """Least share of a patch that is tissue, from 0 (any of it) to 1 (all of it), where `over` is tissue."""
    positions: Path | None = None
    """Folder with the patches of each slide, to take these instead of a grid: SLIDE.h5 or SLIDE_patches.h5 (`coords` of
    CLAM or TRIDENT), SLIDE.geojson (squares, or points in the middle of patches) or SLIDE.csv (columns x and y, the
    upper left corner), in pixels of level 0 of the slide.
    """
    flip_rotate: bool = True
    """Show each patch in one of its eight orientations in training, besides `data.flip_rotate` of the slide."""
    shift: int = 0
    """Take each patch up to this many pixels aside in training."""
    stain: float = 0.0
    """Change the amount of each stain of each patch by up to this share in training, such as 0.05."""
    tint: float = 0.0
    """Shift each colour of each patch by up to this optical density in training, such as 0.02."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("stride", 1), ("shift", 0), ("stain", 0), ("tint", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"data.patches.{name} is {value}; it must be {least} or more")
        if self.mpp != "own" and not is_plausible(self.mpp):
            raise UserError(
                f"data.patches.mpp is {self.mpp}; it is micrometres per pixel, such as 0.5, and not a magnification"
            )
        if not 0 <= self.min_tissue <= 1:
            raise UserError(f"data.patches.min_tissue is {self.min_tissue}; it is a share, from 0 to 1")
        if self.positions is not None and not self.positions.is_dir():
            raise UserError(f"data.patches.positions is {self.positions}; there is no such folder")
        if self.positions is not None and self.stride is not None:
            raise UserError("data.patches.positions says where patches are; leave out data.patches.stride")

    @property
    def resolution(self) -> float | None:
        """Micrometres per pixel; None is that of the finest level."""
        return None if self.mpp == "own" else self.mpp

    @property
    def step(self) -> int:
        """Pixels from one patch of the grid to the next."""
        return self.size if self.stride is None else self.stride


Numbers = NDArray[np.int64]


def over_slide(shape: tuple[int, int], size: int, stride: int) -> Positions:
    """The corners of all patches of a grid that lie whole in an image."""
    rows, columns = (np.arange(0, side - size + 1, stride, dtype=np.int32) for side in shape)
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def over_tissue(mask: TissueMask, shape: tuple[int, int], size: int, stride: int, share: float) -> Positions:
    """Corners of the grid's patches that hold tissue, and at least this share of it.

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


log = logging.getLogger("wsi_trainer")

Tissue = Callable[[Image], TissueMask]
"""Where an image of a slide has tissue."""


def open_bag(
    path: Path, config: PatchConfig, tissue: Tissue = Image.tissue, source_mpp: float | None = None, readers: int = 2,
    name: str | None = None, shrink: float = 1.0,
) -> Bag:  # fmt: skip
    """The patches of a slide or of a store, in the order in which they are best read.

    Args:
        path: The slide or the store.
        config: Which patches.
        tissue: Finds the tissue, where patches are taken over it.
        source_mpp: Micrometres per pixel of a slide, where its file does not say it or says it wrong.
        readers: How many threads read it.
        name: What the slide is called in errors.
        shrink: Pixels of level 0 along one pixel, where `mpp` is own.
    """
    image = open_at(Slide.open(path, mpp=source_mpp, name=name), config.resolution, shrink)
    positions = positions_of(image, config, tissue)
    positions = along_blocks(positions, config.size, image.block, image.size)
    if len(positions) == 1:
        _tell_single(path)
    return Bag(image.slide, positions, config.size, config.resolution, factor=shrink, threads=readers)


def positions_of(image: Image, config: PatchConfig, tissue: Tissue) -> Positions:
    """Corners of the patches of an image; an error where there are none."""
    path, size, shape = image.slide.path, config.size, image.size
    if config.positions is not None:
        try:
            return chosen_patches(config.positions, path).positions(image.place, shape, size)
        except UserError as error:
            if isinstance(error, SlideError) and error.path == str(path):
                raise
            raise SlideError(path, str(error)) from error  # of its file: whoever leaves the slide out hears of both
    if min(shape) < size:
        raise SlideError(
            path,
            f"has {shape[0]} × {shape[1]} pixels at data.patches.mpp {config.mpp}, which is too small for one patch of "
            f"{size}; set a smaller data.patches.size, or a finer mpp",
        )
    if config.over == "slide":
        return over_slide(shape, size, config.step)
    mask = tissue(image)
    positions = over_tissue(mask, shape, size, config.step, config.min_tissue)
    if not len(positions):
        found = "no tissue was found on it" if not mask.mask.any() else f"{mask.share:.2%} of it is tissue"
        raise SlideError(
            path,
            f"none of its patches has data.patches.min_tissue {config.min_tissue:g} of tissue ({found}); set it lower, "
            "or take all patches by data.patches.over: slide",
        )
    return positions


def open_at(slide: Slide, mpp: float | None, shrink: float = 1.0) -> Image:
    """The image of a slide at this resolution, or its finest level; an error says how to come by it."""
    try:
        return Image(slide, mpp, factor=shrink)
    except AbsentResolution as error:
        way_out = "set data.patches.mpp to what there is (own takes the finest level)"
        if slide.stored:
            way_out += f", or convert the slide with `wsi-train preprocess --mpp {mpp:g}`"
        raise SlideError(slide.path, f"{error.reason}; {way_out}") from error


def augmented(source: Bag, slide: Augmentation, each: PatchAugmentations) -> Augmented:
    """A bag as it is shown in one epoch."""
    return Augmented(source.at(moved(source.positions, slide, each)), slide, each)


def augmenter_of(config: PatchConfig, seed: int) -> Augmenter:
    """Draws how the patches of bags are shown in training."""
    return Augmenter(seed, config.flip_rotate, config.shift, config.stain, config.tint)


@cache
def _tell_single(path: Path) -> None:
    log.warning(
        "%s: its bag is one patch; attention over it has nothing to choose from. Is data.patches.size or mpp meant for "
        "slides as small?",
        clean(path),
    )
