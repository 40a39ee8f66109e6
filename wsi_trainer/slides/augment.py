"""Exact augmentation of whole slides: a tile of the augmented slide is the augmented tile of the slide.

Everything is a function of one pixel (colour) or of its position (flips, turns, shifts), drawn once for a
slide and an epoch. Nothing is computed before a tile is read, and boxes known to be constant stay known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box, TileSource

from .formats import format_of
from .stain import StainShift

GLASS = 255


@dataclass(frozen=True)
class Augmentation:
    """How one slide is shown in one epoch.

    Attributes:
        flip_y, flip_x: Mirror the rows, the columns.
        transpose: Then exchange rows with columns. The three together give the eight ways to hold a slide.
        shift: Pixels by which the slide is moved down and to the right, before it is turned; what is moved
            out of the image is cut, what comes in is glass.
        stain: How colours change; None leaves them.
    """

    flip_y: bool = False
    flip_x: bool = False
    transpose: bool = False
    shift: tuple[int, int] = (0, 0)
    stain: StainShift | None = None


@dataclass(frozen=True)
class Augmenter:
    """Draws augmentations. Equal seed, slide and epoch give the same one, in any process and order.

    Attributes:
        turn: Flips and quarter turns.
        shift: The largest shift in pixels, in both directions.
        stain: The largest relative change of the amount of each stain, such as 0.1.
        tint: The largest shift of each colour in optical density, such as 0.03.
    """

    seed: int = 0
    turn: bool = True
    shift: int = 0
    stain: float = 0.0
    tint: float = 0.0

    def draw(self, slide: str, epoch: int) -> Augmentation:
        """The augmentation of a slide, by its name, in an epoch."""
        name = int.from_bytes(hashlib.sha256(slide.encode()).digest()[:8], "little")
        rng = np.random.default_rng([self.seed, epoch, name])
        bits = rng.integers(0, 2, 3) if self.turn else np.zeros(3, int)
        shift = rng.integers(-self.shift, self.shift + 1, 2)
        factors, tint = 1 + self.stain * rng.uniform(-1, 1, 3), self.tint * rng.uniform(-1, 1, 3)
        colours = StainShift(tuple(map(float, factors)), tuple(map(float, tint))) if self.stain or self.tint else None
        return Augmentation(bool(bits[0]), bool(bits[1]), bool(bits[2]), (int(shift[0]), int(shift[1])), colours)


@dataclass(frozen=True, eq=False)
class AugmentedSource:
    """A `TileSource` of bytes that shows another one augmented."""

    source: TileSource
    augmentation: Augmentation

    @property
    def shape(self) -> tuple[int, ...]:
        n, c, height, width = self.source.shape
        return (n, c, width, height) if self.augmentation.transpose else (n, c, height, width)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def memory_format(self) -> torch.memory_format:
        """How the pixels of all boxes lie in memory: as the source's do."""
        return format_of(self.source)

    def read(self, box: Box) -> Tensor:
        """The pixels of a box of the augmented slide."""
        inner = self._inner(box)
        tile = self._read_shifted(inner)
        a = self.augmentation
        if a.stain is not None:
            tile = a.stain.apply(tile)
        axes = [axis for axis, flip in ((2, a.flip_y), (3, a.flip_x)) if flip]
        tile = tile.flip(axes) if axes else tile
        return tile.transpose(2, 3).contiguous(memory_format=self.memory_format) if a.transpose else tile

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        y, x, height, width = _sizes(self._shifted(self._inner(box)))
        inside = self._clip(y, x, height, width)
        glass = torch.full((self.shape[1],), GLASS, dtype=self.dtype)
        if inside.empty:
            value: Tensor | None = glass
        else:
            value = self.source.constant(inside)
            if value is not None and inside.extent != (height, width) and not torch.equal(value, glass):
                value = None
        if value is None or self.augmentation.stain is None:
            return value
        return self.augmentation.stain.apply(value[None, :, None, None])[0, :, 0, 0]

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Passes on what will be asked for soon, if the source wants to know."""
        wish = getattr(self.source, "prefetch", None)
        if wish is not None:
            inner = (self._clip(*_sizes(self._shifted(self._inner(box)))) for box in boxes)
            wish(box for box in inner if not box.empty)

    def _inner(self, box: Box) -> Box:
        """The box before flips and turns."""
        (y0, x0), (y1, x1) = box.lo, box.hi
        if self.augmentation.transpose:
            y0, x0, y1, x1 = x0, y0, x1, y1
        height, width = self.source.shape[2:]
        if self.augmentation.flip_y:
            y0, y1 = height - y1, height - y0
        if self.augmentation.flip_x:
            x0, x1 = width - x1, width - x0
        return Box((y0, x0), (y1, x1))

    def _shifted(self, box: Box) -> Box:
        down, right = self.augmentation.shift
        return Box((box.lo[0] - down, box.lo[1] - right), (box.hi[0] - down, box.hi[1] - right))

    def _clip(self, y: int, x: int, height: int, width: int) -> Box:
        rows, columns = self.source.shape[2:]
        lo = (min(max(y, 0), rows), min(max(x, 0), columns))
        hi = (max(min(y + height, rows), lo[0]), max(min(x + width, columns), lo[1]))
        return Box(lo, hi)

    def _read_shifted(self, box: Box) -> Tensor:
        y, x, height, width = _sizes(self._shifted(box))
        inside = self._clip(y, x, height, width)
        if inside.extent == (height, width):
            return self.source.read(inside)
        shape = (*self.source.shape[:2], height, width)
        tile = torch.empty(shape, dtype=self.dtype, memory_format=self.memory_format).fill_(GLASS)
        if not inside.empty:
            top, left = inside.lo[0] - y, inside.lo[1] - x
            rows, columns = inside.extent
            tile[:, :, top : top + rows, left : left + columns] = self.source.read(inside)
        return tile


def _sizes(box: Box) -> tuple[int, int, int, int]:
    return box.lo[0], box.lo[1], box.hi[0] - box.lo[0], box.hi[1] - box.lo[1]
