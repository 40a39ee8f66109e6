"""A slide that is stored lying on its side or mirrored, turned the way it is meant to be seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .closing import Closing
from .protocol import Level, Pixels, Reader

# By TIFF's number of an orientation: whether rows and columns are exchanged, and then which axes run backwards.
_TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip


class UprightReader(Closing):
    """Reads a slide as if it were stored upright."""

    def __init__(self, reader: Reader, orientation: int) -> None:
        self._reader, self._orientation = reader, orientation
        self._exchanged, self._bottom_up, self._right_left = _TURNS[orientation]
        self.info = reader.info
        if self._exchanged:
            levels = tuple(Level(level.width, level.height, level.downsample) for level in reader.info.levels)
            mpp = reader.info.mpp
            details = dict(reader.info.details)
            if "tile" in details:
                details["tile"] = "x".join(reversed(details["tile"].split("x")))
            self.info = replace(
                reader.info, levels=levels, mpp=(mpp[1], mpp[0]) if mpp is not None else None, details=details
            )

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        size = self.info.levels[level]
        top = size.height - y - height if self._bottom_up else y
        left = size.width - x - width if self._right_left else x
        if self._exchanged:
            pixels = self._reader.read(level, left, top, width, height).transpose(1, 0, 2)
        else:
            pixels = self._reader.read(level, top, left, height, width)
        return np.ascontiguousarray(pixels[:: -1 if self._bottom_up else 1, :: -1 if self._right_left else 1])

    def associated(self, name: str) -> Pixels:
        return self._reader.associated(name)

    def close(self) -> None:
        self._reader.close()

    def __reduce__(self) -> tuple[type[UprightReader], tuple[Reader, int]]:
        return UprightReader, (self._reader, self._orientation)


def upright(reader: Reader) -> Reader:
    """A reader whose first row is the top and whose first column is the left side of the slide."""
    orientation = getattr(reader, "orientation", 1)
    return reader if orientation == 1 else UprightReader(reader, orientation)
