"""The eight ways to hold a slide: a source that is flipped and transposed as it is read.

Augmenting the source and not the pixels keeps the image lazy: a tile of the turned slide is a turned tile
of the slide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource

ORIENTATIONS = 8


class Oriented:
    """A `TileSource` that shows another one in orientation 0 to 7.

    Bit 0 flips the rows, bit 1 flips the columns, and bit 2 then exchanges rows with columns.
    """

    def __init__(self, source: TileSource, orientation: int) -> None:
        if not 0 <= orientation < ORIENTATIONS:
            raise ValueError(f"orientation is {orientation}; it must be 0 to {ORIENTATIONS - 1}")
        if len(source.shape) != 4:
            raise ValueError(f"only flat slides are turned, not a source of shape {tuple(source.shape)}")
        self.source = source
        self.flips = tuple(axis for axis in (0, 1) if orientation >> axis & 1)
        self.transposed = bool(orientation & 4)
        height, width = source.shape[2:]
        self.shape = (*source.shape[:2], *((width, height) if self.transposed else (height, width)))
        self.dtype: torch.dtype = source.dtype

    def read(self, box: Box) -> Tensor:
        tile = self.source.read(self._inner(box))
        tile = tile.flip([axis + 2 for axis in self.flips]) if self.flips else tile
        return tile.transpose(2, 3).contiguous() if self.transposed else tile

    def constant(self, box: Box) -> Tensor | None:
        return self.source.constant(self._inner(box))

    def _inner(self, box: Box) -> Box:
        """The box of the slide that this box of the turned slide shows."""
        intervals = list(box.intervals())
        if self.transposed:
            intervals.reverse()
        for axis in self.flips:
            low, high = intervals[axis]
            size = self.source.shape[axis + 2]
            intervals[axis] = (size - high, size - low)
        return Box.of(intervals)
