"""A slide at a wanted resolution, box by box, with nothing held whole.

The coarsest level that is at least as fine as wanted is filtered down with Lanczos (averaged, for
overviews). A box is computed with the margin that the filter needs, so it does not depend on how
the image is cut.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from wsi_trainer.slide.formats.base import Level, Pixels, SlideInfo, blank, to_planes

_SUPPORT = {Image.Resampling.LANCZOS: 3.0, Image.Resampling.BOX: 0.5}
_LARGEST_SOURCE = 4096  # px a side of a source block


class Pyramid(Protocol):
    """A slide, as far as it is needed to make it coarser."""

    path: Path

    @property
    def info(self) -> SlideInfo: ...

    @property
    def levels(self) -> tuple[Level, ...]: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels: ...

    def read_into(self, level: int, y: int, x: int, out: Pixels) -> None: ...

    def empty(self, level: int, y: int, x: int, height: int, width: int) -> bool: ...


class ScaledImage:
    """A slide in which one pixel is `factor` pixels of level 0, 1 or more: the same for both axes, or y and x."""

    def __init__(self, slide: Pyramid, factor: float | tuple[float, float], *, smooth: bool = True) -> None:
        factors = factor if isinstance(factor, tuple) else (factor, factor)
        if min(factors) < 1:
            raise ValueError(f"factor={factor}: making a slide finer would invent pixels")
        self._slide = slide
        levels = slide.levels
        fits = [i for i, level in enumerate(levels) if level.downsample <= min(factors) * 1.0001]
        self.level = max(fits, key=lambda i: levels[i].downsample)
        steps = [factor / levels[self.level].downsample for factor in factors]
        self._steps = tuple(1.0 if abs(step - 1) < 1e-4 else step for step in steps)
        largest = max(self._steps)
        # Always filtered in the same cells, so that rounding does not depend on what is read at a time.
        self._cell = max(1, min(256, int(_LARGEST_SOURCE / largest)))
        self._size = self._cell * max(1, int(_LARGEST_SOURCE / largest / self._cell))
        self._filter = Image.Resampling.LANCZOS if smooth else Image.Resampling.BOX
        height, width = slide.shape
        self.shape = (max(1, round(height / factors[0])), max(1, round(width / factors[1])))
        if self.is_exact:
            self.shape = (levels[self.level].height, levels[self.level].width)

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of level 0, y and x, along one pixel: the factor, or what a level has that is taken as it is."""
        step = self._slide.levels[self.level].downsample
        return step * self._steps[0], step * self._steps[1]

    @property
    def is_exact(self) -> bool:
        """True if pixels are those of a level of the slide, unfiltered."""
        return self._steps == (1.0, 1.0)

    def read(self, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box; outside the slide is background."""
        if self.is_exact:
            return self._slide.read(self.level, y, x, height, width)
        out = blank(height, width, self._slide.info.background)
        top, left = max(y, 0), max(x, 0)
        bottom, right = min(y + height, self.shape[0]), min(x + width, self.shape[1])
        for row in range(top // self._size * self._size, bottom, self._size):
            for column in range(left // self._size * self._size, right, self._size):
                part = (
                    max(row, top),
                    max(column, left),
                    min(row + self._size, bottom),
                    min(column + self._size, right),
                )
                out[part[0] - y : part[2] - y, part[1] - x : part[3] - x] = self._area(*part)
        return out

    def read_into(self, y: int, x: int, out: Pixels) -> None:
        """Fills an array (c, y, x) with the pixels whose corner is (y, x)."""
        if self.is_exact:
            self._slide.read_into(self.level, y, x, out)
        else:
            to_planes(self.read(y, x, *out.shape[1:]), out)

    def empty(self, y: int, x: int, height: int, width: int) -> bool:
        """True if a box inside the image is known, without reading, to be white."""
        if self.is_exact:
            return self._slide.empty(self.level, y, x, height, width)
        cell = self._cell
        top, left, *_ = self._source_of(y // cell * cell, x // cell * cell)
        *_, bottom, right = self._source_of((y + height - 1) // cell * cell, (x + width - 1) // cell * cell)
        level = self._slide.levels[self.level]
        bottom, right = min(bottom, level.height), min(right, level.width)
        return self._slide.empty(self.level, top, left, bottom - top, right - left)

    def _area(self, top: int, left: int, bottom: int, right: int) -> Pixels:
        """A part of the result whose source is read at once and filtered cell by cell."""
        cell = self._cell
        rows = range(top // cell * cell, bottom, cell)
        columns = range(left // cell * cell, right, cell)
        first = self._source_of(rows[0], columns[0])
        last = self._source_of(rows[-1], columns[-1])
        source = self._read_continued(first[0], first[1], last[2] - first[0], last[3] - first[1])
        out = np.empty((bottom - top, right - left, 3), np.uint8)
        for row in rows:
            for column in columns:
                y0, x0, y1, x1 = self._source_of(row, column)
                piece = source[y0 - first[0] : y1 - first[0], x0 - first[1] : x1 - first[1]]
                pixels = self._filtered(piece, row, column, y0, x0)
                a, b = max(row, top), max(column, left)
                pixels = pixels[a - row : bottom - row, b - column : right - column]
                out[a - top : a - top + pixels.shape[0], b - left : b - left + pixels.shape[1]] = pixels
        return out

    def _source_of(self, row: int, column: int) -> tuple[int, int, int, int]:
        """The part of the level that a cell needs: top, left, bottom, right."""
        level = self._slide.levels[self.level]
        margins = [_SUPPORT[self._filter] * step + 1 for step in self._steps]
        steps = self._steps
        top, bottom = _span(row, self._extent(row, 0), steps[0], margins[0], self._needed(0, level.height))
        left, right = _span(column, self._extent(column, 1), steps[1], margins[1], self._needed(1, level.width))
        return top, left, bottom, right

    def _extent(self, start: int, axis: int) -> int:
        return min(self._cell, self.shape[axis] - start)

    def _read_continued(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Pixels of the level, continued by its border.

        The size of the result is rounded, so its last pixel may reach beyond the slide.
        """
        level = self._slide.levels[self.level]
        inside = (min(height, level.height - top), min(width, level.width - left))
        source = self._slide.read(self.level, top, left, *inside)
        pad = ((0, height - inside[0]), (0, width - inside[1]), (0, 0))
        return np.pad(source, pad, mode="edge") if pad[0][1] or pad[1][1] else source

    def _filtered(self, piece: Pixels, row: int, column: int, top: int, left: int) -> Pixels:
        height, width = self._extent(row, 0), self._extent(column, 1)
        y, x = row * self._steps[0] - top, column * self._steps[1] - left
        # Never beyond the piece by a rounding error.
        ends = (min(x + width * self._steps[1], piece.shape[1]), min(y + height * self._steps[0], piece.shape[0]))
        image = Image.fromarray(np.ascontiguousarray(piece))
        return np.asarray(image.resize((width, height), self._filter, box=(x, y, *ends)))

    def _needed(self, axis: int, size: int) -> int:
        """The number of pixels of the level that the whole result reaches over."""
        return max(size, math.ceil(self.shape[axis] * self._steps[axis] - 1e-6))


def _span(start: int, length: int, step: float, margin: float, size: int) -> tuple[int, int]:
    """The source pixels that an output span needs."""
    low = math.floor(start * step - margin)
    high = math.ceil((start + length) * step + margin)
    return max(0, low), min(size, high)


def halve(pixels: Pixels, out: Pixels | None = None) -> Pixels:
    """Means over 2 x 2 pixels of planes (c, y, x), halves rounded up; a last odd row or column is continued by itself.

    An array that is given may be larger: its upper left part is filled.
    """
    channels, height, width = pixels.shape
    if out is None:
        out = np.empty((channels, -(-height // 2), -(-width // 2)), np.uint8)
    for plane, half in zip(pixels, out):
        half[: -(-height // 2), : -(-width // 2)] = Image.fromarray(plane).reduce(2)
    return out
