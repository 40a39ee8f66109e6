"""A slide at a wanted resolution, box by box, with nothing held whole.

The coarsest level that is at least as fine as wanted is filtered down with Lanczos (averaged, for
overviews). A box is computed with the margin that the filter needs, so it does not depend on how
the image is cut.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from .readers import Reader
from .readers.protocol import Pixels, blank

_SUPPORT = {Image.Resampling.LANCZOS: 3.0, Image.Resampling.BOX: 0.5}
_LARGEST_SOURCE = 4096  # px a side of a source block


class ScaledImage:
    """A slide in which one pixel is `factor` pixels of level 0, which must be 1 or more."""

    def __init__(self, reader: Reader, factor: float, *, smooth: bool = True) -> None:
        if factor < 1:
            raise ValueError(f"factor={factor}: making a slide finer would invent pixels")
        self._reader = reader
        levels = reader.info.levels
        fits = [i for i, level in enumerate(levels) if level.downsample <= factor * 1.0001]
        self.level = max(fits, key=lambda i: levels[i].downsample)
        self._step = factor / levels[self.level].downsample
        if abs(self._step - 1) < 1e-4:
            self._step = 1.0
        self._filter = Image.Resampling.LANCZOS if smooth else Image.Resampling.BOX
        height, width = reader.info.shape
        self.shape = (max(1, round(height / factor)), max(1, round(width / factor)))
        if self._step == 1.0:
            self.shape = (levels[self.level].height, levels[self.level].width)

    @property
    def is_exact(self) -> bool:
        """Whether pixels are those of a level of the slide, unfiltered."""
        return self._step == 1.0

    def read(self, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box; outside the slide is background."""
        if self.is_exact:
            return self._reader.read(self.level, y, x, height, width)
        out = blank(height, width, self._reader.info.background)
        top, left = max(y, 0), max(x, 0)
        bottom, right = min(y + height, self.shape[0]), min(x + width, self.shape[1])
        size = max(1, int(_LARGEST_SOURCE / self._step))
        for row in range(top, bottom, size):
            for column in range(left, right, size):
                h, w = min(size, bottom - row), min(size, right - column)
                out[row - y : row - y + h, column - x : column - x + w] = self._block(row, column, h, w)
        return out

    def _block(self, y: int, x: int, height: int, width: int) -> Pixels:
        margin = _SUPPORT[self._filter] * self._step + 1
        full = self._reader.info.levels[self.level]
        top, bottom = _span(y, height, self._step, margin, full.height)
        left, right = _span(x, width, self._step, margin, full.width)
        source = self._reader.read(self.level, top, left, bottom - top, right - left)
        box = (
            min(x * self._step, full.width) - left,
            min(y * self._step, full.height) - top,
            min((x + width) * self._step, full.width) - left,
            min((y + height) * self._step, full.height) - top,
        )
        image = Image.fromarray(source).resize((width, height), self._filter, box=box)
        return np.asarray(image)


def _span(start: int, length: int, step: float, margin: float, size: int) -> tuple[int, int]:
    """The source pixels that an output span needs."""
    low = math.floor(start * step - margin)
    high = math.ceil((start + length) * step + margin)
    return max(0, low), min(size, high)


def halve(pixels: Pixels) -> Pixels:
    """Means over 2 x 2 pixels; a last odd row or column is continued by itself."""
    height, width = pixels.shape[-2:]
    if height % 2 or width % 2:
        pad = [(0, 0)] * (pixels.ndim - 2) + [(0, height % 2), (0, width % 2)]
        pixels = np.pad(pixels, pad, mode="edge")
    total = pixels[..., 0::2, :].astype(np.uint16)
    total += pixels[..., 1::2, :]
    total = total[..., 0::2] + total[..., 1::2]
    total += 2
    total >>= 2
    return total.astype(np.uint8)
