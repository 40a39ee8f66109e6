"""Opening the bag of a slide: its resolution, its positions, and the source that reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from wsi_trainer.data.patches.config import PatchConfig
from wsi_trainer.data.patches.given import chosen_patches
from wsi_trainer.data.patches.grid import over_slide, over_tissue
from wsi_trainer.errors import UserError
from wsi_trainer.slide.augment import Augmentation, Augmented, PatchAugmentations, PatchAugmenter, moved
from wsi_trainer.slide.errors import AbsentResolution, SlideError
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Bag, Image, Positions, along_blocks
from wsi_trainer.words import clean

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
    """Where the patches of an image are; an error where there are none."""
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


def augmenter_of(config: PatchConfig, seed: int) -> PatchAugmenter:
    """Draws how the patches of bags are shown in training."""
    return PatchAugmenter(seed, config.turn, config.shift, config.stain, config.tint)


@cache
def _tell_single(path: Path) -> None:
    log.warning(
        "%s: its bag is one patch; attention over it has nothing to choose from. Is data.patches.size or mpp meant for "
        "slides as small?",
        clean(path),
    )
