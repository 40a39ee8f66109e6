"""Small pictures of slides inside the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image
from torch import Tensor

from wsi_trainer.data import dense
from wsi_trainer.errors import UserError
from wsi_trainer.foreign.pictures import read_picture
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.source import SlideSource

SIDE = 150


def slide_picture(path: Path, side: int = SIDE) -> str:
    """The slide shrunk to `side` pixels, as the address of a JPEG picture that needs no file."""
    return jpeg(Image.fromarray(overview(path, side)[0].permute(1, 2, 0).numpy()), side)


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


def overview(path: Path, side: int) -> Tensor:
    """The coarsest level (1, 3, height, width) of the slide that has at least `side` pixels, else the finest."""
    source = SlideSource(path)
    level = 0
    while True:
        level += 1
        try:
            coarser = SlideSource(path, level=level)
        except SlideError:  # there is no such level
            return dense(source)
        if max(coarser.shape[2:]) < side:
            return dense(source)
        source = coarser
