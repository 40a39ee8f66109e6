"""Small pictures of slides inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from wsi_trainer.errors import UserError
from wsi_trainer.explain.maps import LabelFile, Segmented
from wsi_trainer.io.untrusted import read_picture
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.slide.mask import OVERLAY
from wsi_trainer.slide.rules import RULES, Rule
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import THUMBNAILS

SIDE = 150


def slide_picture(path: Path, side: int = SIDE) -> str | None:
    """The slide shrunk to `side` pixels, as the address of a JPEG picture that needs no file; None where it is gone."""
    if not path.exists():
        return None
    with Slide.open(path) as slide:
        return jpeg(Image.fromarray(slide.thumbnail(side)), side)


def jpeg(picture: Image.Image, side: int) -> str:
    """A picture shrunk to `side` pixels, as the address of a JPEG picture that needs no file."""
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def map_picture(path: Path, side: int = 2 * SIDE) -> str:
    """A picture of a map, shrunk, as the address of a JPEG picture that needs no file."""
    try:
        return jpeg(read_picture(path, "RGB"), side)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no picture any more; make the maps again") from error


FILLED = 110
"""Of the classes of a segmentation, of 255."""


def regions_picture(path: Path, drawn: Path | None, found: Segmented, side: int = 2 * SIDE) -> str | None:
    """The slide shrunk, with the found classes in their colours, drawn regions outlined in green and found ones in red;
    None where it is gone.
    """
    if not path.exists():
        return None
    with Slide.open(path) as slide:
        picture, place, width = Image.fromarray(slide.thumbnail(side)), slide.transform, slide.shape[1]
    picture.thumbnail((side, side))
    if found.labels is not None:
        over = _filled(found.labels, picture.size)
        picture = Image.alpha_composite(picture.convert("RGBA"), over).convert("RGB")
    for colour, file in (("#00b070", drawn), ("#d02020", found.outlines)):
        for region in read_regions(file) if file else ():
            for ring in region.rings:
                points = place.to_image(ring) * (picture.width / width)
                ImageDraw.Draw(picture).line(points.ravel().tolist(), fill=colour, width=2)
    return jpeg(picture, side)


def _filled(labels: LabelFile, size: tuple[int, int]) -> Image.Image:
    """The classes but the first in their colours, from the coarsest level that is as large as the picture."""
    levels, _ = labels.load()
    level = next((one for one in reversed(levels) if max(one.shape) >= max(size)), levels[0])
    values = np.asarray(level[:])
    colours = np.zeros((256, 4), np.uint8)
    for number, name in enumerate(labels.classes[:256]):
        colours[number] = (*PathClass.of(name, number).colour, FILLED if number else 0)
    return Image.fromarray(colours[values]).resize(size, Image.Resampling.NEAREST)


OPACITY = 170
"""Of what a rule found, of 255."""


def overlay_of(store: Path) -> Path | None:
    """The picture of what rules found on the slide of a store, which `preprocess` wrote; None where there is none."""
    if store.suffix != ".zarr":
        return None
    for folder in store.parents:  # names of stores may have folders in them
        path = folder / THUMBNAILS / f"{store.relative_to(folder).with_suffix('')}{OVERLAY}"
        if path.is_file():
            return path
    return None


def tissue_picture(overlay: Path, side: int = 2 * SIDE) -> str:
    """The slide's thumbnail with each rule's findings in its colour, as the address of a picture that needs no file."""
    thumbnail = overlay.with_name(overlay.name.removesuffix(OVERLAY) + ".jpg")
    try:
        picture = read_picture(thumbnail, "RGBA")
        over = read_picture(overlay, "RGBA").resize(picture.size, Image.Resampling.NEAREST)
    except (OSError, ValueError) as error:
        raise UserError(f"{overlay} or its thumbnail is no picture any more; convert the slide again") from error
    over.putalpha(over.getchannel("A").point(lambda alpha: min(alpha, OPACITY)))
    return jpeg(Image.alpha_composite(picture, over).convert("RGB"), side)


def rules_shown(overlays: Iterable[Path]) -> list[type[Rule]]:
    """The rules that found something on any of the slides, in the order of their table."""
    found: set[int] = set()
    for path in overlays:
        found |= set(np.unique(np.asarray(read_picture(path))).tolist())
    return [rule for number, rule in enumerate(RULES, start=1) if number in found]
