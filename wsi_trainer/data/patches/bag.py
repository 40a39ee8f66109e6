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
from wsi_trainer.slides.augment import Augmentation
from wsi_trainer.slides.augment_patches import AugmentedPatches, PatchAugmentations, PatchAugmenter, moved
from wsi_trainer.slides.blocks import is_own_store
from wsi_trainer.slides.errors import AbsentResolution, SlideError
from wsi_trainer.slides.patch_source import PatchSource, Positions, along_blocks
from wsi_trainer.slides.source import SlideSource
from wsi_trainer.slides.tissue import TissueMask
from wsi_trainer.words import clean

log = logging.getLogger("wsi_trainer")

Tissue = Callable[[Path, SlideSource], TissueMask]
"""Where an image of a slide has tissue."""


def open_bag(
    path: Path, config: PatchConfig, tissue: Tissue, source_mpp: float | None = None, readers: int = 2
) -> PatchSource:
    """The patches of a slide or of a store, in the order in which they are best read.

    Args:
        path: The slide or the store.
        config: Which patches.
        tissue: Finds the tissue, where patches are taken over it.
        readers: How many threads read it.
        source_mpp: Micrometres per pixel of a slide, where its file does not say it or says it wrong.
    """
    source_mpp = None if is_own_store(path) else source_mpp
    image = open_at(path, config.resolution, source_mpp)
    shape = image.shape[2], image.shape[3]
    positions = positions_of(image, config, tissue)
    image.close()
    positions = along_blocks(positions, config.size, image.block, shape)
    if len(positions) == 1:
        _tell_single(path)
    return PatchSource(path, positions, config.size, mpp=config.resolution, source_mpp=source_mpp, threads=readers)


def positions_of(image: SlideSource, config: PatchConfig, tissue: Tissue) -> Positions:
    """Where the patches of an image are; an error where there are none."""
    path, size, shape = image.path, config.size, (image.shape[2], image.shape[3])
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
    mask = tissue(path, image)
    positions = over_tissue(mask, shape, size, config.step, config.min_tissue)
    if not len(positions):
        found = "no tissue was found on it" if not mask.mask.any() else f"{mask.share:.2%} of it is tissue"
        raise SlideError(
            path,
            f"none of its patches has data.patches.min_tissue {config.min_tissue:g} of tissue ({found}); set it lower, "
            "or take all patches by data.patches.over: slide",
        )
    return positions


def open_at(path: Path, mpp: float | None, source_mpp: float | None) -> SlideSource:
    """The image of a slide at this resolution, or its finest level; an error says how to come by it."""
    try:
        return SlideSource(path, mpp=mpp, source_mpp=source_mpp)
    except AbsentResolution as error:
        way_out = "set data.patches.mpp to what there is (own takes the finest level)"
        if is_own_store(path):
            way_out += f", or convert the slide with `wsi-train preprocess --mpp {mpp:g}`"
        raise SlideError(path, f"{error.reason}; {way_out}") from error


def augmented(source: PatchSource, slide: Augmentation, each: PatchAugmentations) -> AugmentedPatches:
    """A bag as it is shown in one epoch."""
    return AugmentedPatches(source.at(moved(source.positions, slide, each)), slide, each)


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
