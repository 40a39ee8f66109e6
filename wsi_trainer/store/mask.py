"""A coarse copy of a slide: for the tissue mask and for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from wsi_trainer.errors import SlideError
from wsi_trainer.io.files import save_picture
from wsi_trainer.slide.formats.base import Pixels
from wsi_trainer.slide.rules import RULES, Overview, Rule, apply_rules, finest
from wsi_trainer.slide.slide import LONGEST, ScaledImage, Slide
from wsi_trainer.slide.tissue import (
    TissueMask,
    draw_tissue,
    find_tissue,
    is_dark,
    mask_scale,
)
from wsi_trainer.store.identity import plain_name
from wsi_trainer.store.settings import Settings

OVERLAY = ".rules.png"
"""Ending of the picture of what rules found, which lies over a thumbnail."""


def find_mask(
    slide: Slide, image: ScaledImage, mpp: tuple[float, float], settings: Settings
) -> tuple[TissueMask | None, Image.Image]:
    """The tissue mask that the settings ask for, and a small picture of the slide."""
    scale = mask_scale(mpp, image.shape)
    coarse = slide.coarse_copy(image, scale)
    small, factors, picture = coarse.pixels, coarse.factors, coarse.picture
    mask: TissueMask | None = None
    if settings.tissue == "otsu":
        mask = find_tissue(small, scale)
    elif settings.tissue == "geojson":
        mask = draw_tissue(outline_of(slide.path, settings), small.shape[:2], scale, factors, slide.origin)
    if mask is not None and settings.chosen:
        width = scale * sum(mpp) / 2
        mask = apply_rules(settings.chosen, mask, _overview(slide, small, factors, width, settings.chosen))
    if mask is not None and settings.background == "constant" and not mask.mask.any():
        raise SlideError(slide.path, "no tissue found, all of it would become background; give --background keep")
    if settings.background == "constant" and is_dark(small):
        raise SlideError(
            slide.path, "its ground is black, as in fluorescence, and --background constant would paint it white; "
            "give --background keep"
        )  # fmt: skip
    picture.thumbnail((LONGEST, LONGEST), Image.Resampling.BOX)
    return mask, picture


def _overview(slide: Slide, small: Pixels, factors: tuple[float, float], mpp: float, rules: Sequence[Rule]) -> Overview:
    """Input of the rules: the pixels of the mask, and those of a copy that is a power of two finer where one asks."""
    times = 1
    while mpp / times > 1.4 * finest(rules) and min(factors) / (2 * times) >= 1:
        times *= 2
    fine = ScaledImage(slide, (max(1.0, factors[0] / times), max(1.0, factors[1] / times)), smooth=False)

    def finer(top: int, left: int, height: int, width: int) -> Pixels:
        box = [side * times for side in (top, left, height, width)]
        # The copy may be a few pixels short of the mask's last: these are continued.
        inside = [max(1, min(side, end - start)) for start, side, end in zip(box[:2], box[2:], fine.shape)]
        pixels = fine.read(box[0], box[1], *inside)
        return np.pad(pixels, ((0, box[2] - inside[0]), (0, box[3] - inside[1]), (0, 0)), mode="edge")

    return Overview(small, mpp, np.ones(small.shape[:2], bool), finer, times)


def outline_of(slide: Path, settings: Settings) -> Path:
    """The GeoJSON file with the tissue of a slide: the one that was given, or that of its name in a folder."""
    if settings.geojson is not None and settings.geojson.is_file():
        return settings.geojson
    folder = settings.geojson or slide.parent
    names = dict.fromkeys((plain_name(slide), slide.stem))  # x.ome.tif: x.geojson, or x.ome.geojson
    paths = [folder / f"{name}.geojson" for name in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise SlideError(slide, f"no tissue outline for it: {paths[0]} does not exist; draw one, or give --tissue otsu")
    return path


def draw_overview(picture: Image.Image, mask: TissueMask | None, path: Path) -> None:
    """Saves the small picture with the outline of the mask in green."""
    if mask is not None:
        inside = Image.fromarray(mask.mask.astype(np.uint8) * 255).resize(picture.size, Image.Resampling.NEAREST)
        rim = np.asarray(inside.filter(ImageFilter.MaxFilter(3))) != np.asarray(inside.filter(ImageFilter.MinFilter(3)))
        pixels = np.array(picture)
        pixels[rim] = (0, 160, 0)
        picture = Image.fromarray(pixels)
    save_picture(picture, path, "JPEG", quality=90)


def draw_overlay(mask: TissueMask, path: Path) -> None:
    """Saves a picture with a pixel for each of the mask: each rule in its colour, and clear elsewhere."""
    numbers = np.zeros(mask.mask.shape, np.uint8)
    for number, rule in enumerate(RULES, start=1):
        if rule.name in mask.found:
            numbers[mask.found[rule.name]] = number
    picture = Image.fromarray(numbers, "P")
    picture.putpalette([value for colour in ((0, 0, 0), *(rule.colour for rule in RULES)) for value in colour])
    save_picture(picture, path, "PNG", transparency=0, optimize=True)
