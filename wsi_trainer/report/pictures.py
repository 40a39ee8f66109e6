"""Small pictures of slides inside the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from wsi_trainer.errors import UserError
from wsi_trainer.foreign.pictures import read_picture
from wsi_trainer.slide.slide import Slide

SIDE = 150


def slide_picture(path: Path, side: int = SIDE) -> str:
    """The slide shrunk to `side` pixels, as the address of a JPEG picture that needs no file."""
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
