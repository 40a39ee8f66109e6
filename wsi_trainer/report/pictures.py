"""Small pictures of slides inside the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from wsi_trainer.data import dense, open_image

SIDE = 150


def slide_picture(path: Path, side: int = SIDE) -> str:
    """The slide shrunk to `side` pixels, as the address of a JPEG picture that needs no file."""
    shape = open_image(path, downsample=1).shape
    factor = max(1, max(shape[-2:]) // (2 * side))
    pixels = dense(open_image(path, factor))[0].permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
