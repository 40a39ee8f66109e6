"""How large an image is that fills a tile, read from its header: a few bytes may ask for any memory.

Tiles of TIFFs may be JPEGs, WebPs and other images with a size of their own, and decoders trust that one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import imagecodecs
import numpy as np
from PIL import Image

Size = tuple[int, int]
"""Height and width."""


def inner_size(compression: int, data: bytes) -> Size | None:
    """The size that an encoded tile declares; None where it is not an image of its own, or declares none."""
    parse = _PARSERS.get(compression)
    return None if parse is None else parse(data)


def _jpeg(data: bytes) -> Size | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        elif marker == 0xDA:
            return None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _webp(data: bytes) -> Size | None:
    try:
        with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
            return image.height, image.width
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def _jpeg2000(data: bytes) -> Size | None:
    at = data.find(b"\xff\x4f\xff\x51")  # start of the codestream, and its sizes
    if at < 0 or at + 24 > len(data):
        return None
    right, bottom, left, top = (int.from_bytes(data[at + i : at + i + 4], "big") for i in (8, 12, 16, 20))
    return bottom - top, right - left


def _jpegxl(data: bytes) -> Size | None:
    try:  # its header is packed bit by bit; the decoder reads it and says what it would need
        imagecodecs.jpegxl_decode(data, out=np.empty((1, 1, 3), np.uint8))
    except ValueError as error:
        found = re.search(r" shape=\((\d+), (\d+)", str(error))
        return (int(found[1]), int(found[2])) if found else None
    except imagecodecs.JpegxlError:
        return None
    return 1, 1


_PARSERS: dict[int, Callable[[bytes], Size | None]] = {7: _jpeg, 34712: _jpeg2000, 50001: _webp, 50002: _jpegxl}
