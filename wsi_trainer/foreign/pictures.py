"""PNG and JPEG of others: of the two formats only, and not larger than what may be decoded at once."""

from __future__ import annotations

import io
import struct
from pathlib import Path

from PIL import Image

from .files import Limit, Unreadable, read_bytes

DECODED = Limit("WSI_TRAIN_MAX_DECODED_MIB", 512)
"""Memory of what has to be decoded at once: a tile or a strip of a slide, a chunk of a store, a PNG, an overview."""
FORMATS = ("PNG", "JPEG")


def read_picture(path: Path, mode: str | None = None) -> Image.Image:
    """A picture, decoded; converted where a mode is asked for.

    Raises:
        Unreadable: It is none, or too large.
        OSError: The system refuses.
    """
    data = read_bytes(path)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            check_pixels(path, *picture.size, channels=4)
            picture.load()
            return picture.convert(mode) if mode else picture.copy()
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(path, f"is no picture, or a damaged one ({type(error).__name__}: {error})") from error


def check_pixels(path: Path, width: int, height: int, channels: int) -> None:
    """Refuse a picture that would take more memory than may be decoded at once."""
    size = width * height * channels / (1 << 20)
    if size > DECODED.value:
        raise Unreadable(
            path, f"a picture of {width} x {height} px would take {size:.0f} MiB of memory at once, more than the "
            f"limit of {DECODED.value:g}; if that is right, set {DECODED.variable} in the environment"
        )  # fmt: skip
