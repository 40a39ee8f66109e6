"""JPEG tiles of a TIFF, decoded into memory that is there already."""

from __future__ import annotations

from typing import Any

import imagecodecs
import numpy as np
from tifffile.tifffile import jpeg_decode_colorspace

from ..scratch import beside_alignment
from .protocol import Pixels

_JPEG = 7


class JpegTiles:
    """Decodes the tiles of one page as tifffile does, without new memory for each."""

    def __init__(self, page: Any) -> None:
        self._tables = page.jpegtables
        self._shape = tuple(map(int, page.chunks))
        self._stored, self._wanted = jpeg_decode_colorspace(
            page.photometric, page.planarconfig, page.extrasamples, page.is_jfif
        )

    @staticmethod
    def suits(page: Any) -> bool:
        """Whether the tiles are whole JPEGs of three bytes a pixel."""
        whole = page.is_tiled and page.compression == _JPEG and page.jpegheader is None and page.fillorder == 1
        return bool(whole and page.dtype == np.uint8 and len(page.chunks) == 3 and page.chunks[2] == 3)

    def decode(self, data: bytes) -> Pixels | None:
        """The pixels of a tile, which this thread's next call overwrites; None if it has another size."""
        out = beside_alignment("jpeg", *self._shape)
        how = {"tables": self._tables, "colorspace": self._stored, "outcolorspace": self._wanted}
        try:
            imagecodecs.jpeg8_decode(data, **how, out=out)
        except ValueError:  # some writers cut the tiles at the border; tifffile fills them up
            return None
        return out
