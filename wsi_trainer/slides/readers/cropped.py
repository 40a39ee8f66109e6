"""Only the scanned part of a slide whose canvas is larger, as MRXS has it."""

from __future__ import annotations

import math
from dataclasses import replace

from .closing import Closing
from .protocol import Level, Pixels, Reader, SlideInfo

_COARSEST = 64.0  # downsample up to which levels stay pixel for pixel those of the slide


class CroppedReader(Closing):
    """Reads a slide as if it began at the corner of its bounds.

    The corner is moved outwards to a whole pixel of the coarser levels, so that every level is cut and none is
    filtered; levels for which that would keep too much are left out.

    Attributes:
        origin: the corner, y and x in pixels of the slide's level 0.
        whole: what is known of the slide itself.
    """

    def __init__(self, reader: Reader, bounds: tuple[int, int, int, int]) -> None:
        self._reader, self._bounds = reader, bounds
        kept = [i for i, level in enumerate(reader.info.levels) if level.downsample <= _COARSEST]
        self._levels = [i for i in kept if reader.info.levels[i].downsample.is_integer()]
        step = math.lcm(*(int(reader.info.levels[i].downsample) for i in self._levels))
        y, x, height, width = bounds
        self.whole = reader.info
        full = reader.info.shape
        self.origin = (max(0, y) // step * step, max(0, x) // step * step)
        bottom, right = min(y + height, full[0]), min(x + width, full[1])
        size = (max(1, bottom - self.origin[0]), max(1, right - self.origin[1]))
        downsamples = [reader.info.levels[i].downsample for i in self._levels]
        levels = tuple(Level(math.ceil(size[0] / d), math.ceil(size[1] / d), d) for d in downsamples)
        self.info = replace(reader.info, levels=levels, bounds=(0, 0, *size))

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        step = int(self.info.levels[level].downsample)
        return self._reader.read(
            self._levels[level], y + self.origin[0] // step, x + self.origin[1] // step, height, width
        )

    def associated(self, name: str) -> Pixels:
        return self._reader.associated(name)

    def close(self) -> None:
        self._reader.close()

    def __reduce__(self) -> tuple[type[CroppedReader], tuple[Reader, tuple[int, int, int, int]]]:
        return CroppedReader, (self._reader, self._bounds)


def crop_to_bounds(reader: Reader) -> Reader:
    """The scanned part of a slide, or the slide itself where its file does not say which part that is."""
    bounds = reader.info.bounds
    whole = bounds is None or bounds[2] < 1 or bounds[3] < 1 or bounds == (0, 0, *reader.info.shape)
    return reader if bounds is None or whole else CroppedReader(reader, bounds)


def origin_of(reader: Reader) -> tuple[int, int]:
    """Where in the slide a reader's first pixel lies."""
    return reader.origin if isinstance(reader, CroppedReader) else (0, 0)


def whole_of(reader: Reader) -> SlideInfo:
    """What is known of the slide of which a reader may read a part only."""
    return reader.whole if isinstance(reader, CroppedReader) else reader.info
