"""The tissue mask of a slide by options: reading, Otsu's method or outlines, rules, and pictures of what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from PIL import Image, ImageFilter

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.files import save_picture
from wsi_trainer.slide.formats.base import Pixels, Range, ReadOptions
from wsi_trainer.slide.geometry import Resolution
from wsi_trainer.slide.names import file_about, slide_name
from wsi_trainer.slide.rules import (
    RULES,
    Blur,
    Edge,
    Fold,
    Overview,
    Pale,
    Pen,
    Rule,
    apply_rules,
    choose,
    finest,
    record_of,
)
from wsi_trainer.slide.slide import LONGEST, ScaledImage, Slide
from wsi_trainer.slide.tissue import TissueMask, draw_tissue, find_tissue, is_dark, mask_scale


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """Options for reading slides and finding their tissue."""

    source_mpp: float | None = None
    """Micrometres per pixel of the slides, where their files do not say it or say it wrong."""
    tissue: Literal["otsu", "none", "geojson"] = "otsu"
    """Method of the tissue mask: otsu by colour, geojson from outlines that you drew or edited."""
    geojson: Path | None = None
    """Folder with SLIDE.geojson for --tissue geojson, by default beside the slides; or the file of one slide."""
    crop: Literal["none", "bounds"] = "none"
    """bounds takes only the scanned part of slides whose canvas is larger (MRXS); positions in micrometres stay those
    of the slide.
    """
    channel: str | None = None
    """The channel to take of slides that have several, by its name in the file or its number from 0."""
    to_8bit: str | None = None
    """LOW:HIGH, the values that become 0 and 255, for slides whose pixels have more than 8 bits: 0:4095."""
    rules: str = "none"
    """Rules beside the mask, with commas: pen, edge, blur, fold are left out, pale is put in. usual is pen and blur,
    all is all, none leaves the mask as it is. OUT/tissue.html shows what each has found.
    """
    pale: Pale = field(default_factory=Pale)
    """Pale tissue that the threshold left out, which is put in."""
    pen: Pen = field(default_factory=Pen)
    """Pen marks."""
    edge: Edge = field(default_factory=Edge)
    """Edges of cover glass and rims of bubbles."""
    blur: Blur = field(default_factory=Blur)
    """Tissue out of focus."""
    fold: Fold = field(default_factory=Fold)
    """Folded tissue."""

    def __post_init__(self) -> None:
        if self.chosen and self.tissue == "none":
            raise UserError("--rules change a tissue mask, and --tissue none makes none: give --tissue otsu or geojson")
        check_mpp("source_mpp", self.source_mpp)
        _ = self.reading

    @property
    def chosen(self) -> tuple[Rule, ...]:
        """The rules that were asked for."""
        return choose(self.rules, [getattr(self, rule.name) for rule in RULES])

    @property
    def reading(self) -> ReadOptions:
        """Channel and range of slides that are more than one image of 8 bits."""
        return ReadOptions(self.channel, Range.parse(self.to_8bit) if self.to_8bit is not None else None)

    def open(self, path: Path, mpp: float | None) -> Slide:
        """Opens a slide as these options say.

        Args:
            path: The slide.
            mpp: Micrometres per pixel from the manifest, where `source_mpp` does not say them.
        """
        said_by: Literal["explicit", "manifest"] = "manifest" if self.source_mpp is None else "explicit"
        given = mpp if self.source_mpp is None else self.source_mpp
        return Slide.open(path, options=self.reading, mpp=given, said_by=said_by, crop=self.crop == "bounds")

    def drawn_in(self, outlines: Path) -> Self:
        """These options for a mask that somebody drew: without rules."""
        plain: dict[str, Any] = {rule.name: rule() for rule in RULES}
        return replace(self, tissue="geojson", geojson=outlines, rules="none", **plain)

    def decides_mask(self) -> dict[str, Any]:
        """All that decides a mask, but the values that are usual."""
        values = {"crop": self.crop, "channel": self.channel, "to_8bit": self.to_8bit, "rules": record_of(self.chosen)}
        usual: dict[str, Any] = {"crop": "none", "channel": None, "to_8bit": None, "rules": {}}
        unusual = {name: value for name, value in values.items() if value != usual[name]}
        return {"source_mpp": self.source_mpp, "tissue": self.tissue, **unusual}


def check_mpp(name: str, value: float | None) -> None:
    """Refuses a size of a pixel that cannot be one."""
    if value is not None and not 0 < value < 1000:
        raise UserError(f"--{name} {value:g}: expected micrometres per pixel, above 0 and below 1000")


OVERLAY = ".rules.png"
"""Ending of the picture of what rules found, which lies over a thumbnail."""


def find_mask(
    slide: Slide, image: ScaledImage, resolution: Resolution, options: MaskOptions, paints: bool = False
) -> tuple[TissueMask | None, Image.Image]:
    """The tissue mask that the options ask for, and a small picture of the slide.

    Args:
        slide: The slide.
        image: The slide at the resolution whose pixels the mask counts in.
        resolution: The size of a pixel of that image.
        options: How tissue is found.
        paints: Whether all else will be painted white, which needs tissue and a bright slide.
    """
    scale = mask_scale(resolution, image.shape)
    coarse = slide.coarse_copy(image, scale)
    small, factors, picture = coarse.pixels, coarse.factors, coarse.picture
    mask: TissueMask | None = None
    if options.tissue == "otsu":
        mask = find_tissue(small, scale)
    elif options.tissue == "geojson":
        mask = draw_tissue(outline_of(slide.path, options), small.shape[:2], scale, factors, slide.origin)
    if mask is not None and options.chosen:
        width = scale * resolution.mean
        mask = apply_rules(options.chosen, mask, _overview(slide, small, factors, width, options.chosen))
    if mask is not None and paints and not mask.mask.any():
        raise SlideError(slide.path, "no tissue found, all of it would become background; give --background keep")
    if paints and is_dark(small):
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


def outline_of(slide: Path, options: MaskOptions) -> Path:
    """The GeoJSON file with the tissue of a slide: the one that was given, or that of its name in a folder."""
    if options.geojson is not None and options.geojson.is_file():
        return options.geojson
    folder = options.geojson or slide.parent
    found = file_about(folder, [slide])
    if found is None:
        path = folder / f"{slide_name(slide)}.geojson"
        raise SlideError(slide, f"no tissue outline for it: {path} does not exist; draw one, or give --tissue otsu")
    return found[1]


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
