"""Small pictures of slides inside the page."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

from PIL import Image
from torch import Tensor

from wsi_trainer.data import dense, open_image
from wsi_trainer.slides.errors import SlideError

SIDE = 150


def slide_picture(path: Path, side: int = SIDE) -> str:
    """The slide shrunk to `side` pixels, as the address of a JPEG picture that needs no file."""
    return _jpeg(Image.fromarray(overview(path, side)[0].permute(1, 2, 0).numpy()), side)


def _jpeg(picture: Image.Image, side: int) -> str:
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def map_picture(path: Path, side: int = 2 * SIDE) -> str:
    """A picture of a map, shrunk, as the address of a JPEG picture that needs no file."""
    with Image.open(path) as picture:
        return _jpeg(picture.convert("RGB"), side)


def overview(path: Path, side: int) -> Tensor:
    """An image (1, 3, height, width) of the slide of at least `side` pixels, if it has so many."""
    longest = max(open_image(path).shape[2:])
    factor = 2 ** int(math.log2(max(1.0, longest / side)))
    while factor > 1:
        try:
            return dense(open_image(path, factor))
        except SlideError:  # a store has no level as coarse as this
            factor //= 2
    return dense(open_image(path))
