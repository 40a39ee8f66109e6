"""Tiles of a slide, as pictures, and of a layer over it, as numbers that the browser colours."""

from __future__ import annotations

import io
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_trainer.errors import UserError
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.slide.formats.base import Pixels
from wsi_trainer.slide.slide import ScaledImage, Slide


class Refusal(UserError):
    """A request that is not answered."""

    status = 400


class BadNumber(Refusal):
    """A number of a request that is none, or is out of its range."""


class Forbidden(Refusal):
    """A request without the token, or one that another web site made the browser send."""

    status = 403


class NotThere(Refusal):
    """Something that the run does not have, or that cannot be read."""

    status = 404


TILE = 512
"""Pixels a side: the chunk of a store."""
MOST_STEP = 8
"""Factor by which a tile may be shrunk from the level of the file: 4096 × 4096 pixels are read for one tile."""
MOST_REGION = 1024
"""Pixels a side of a region at full resolution."""
QUALITY = 90


def grid_of(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """Rows and columns of tiles of a side that cover a shape."""
    return -(-shape[0] // side), -(-shape[1] // side)


class TiledSlide:
    """An open slide and its tiles. The slide is closed when nobody refers to its tiles any more.

    Attributes:
        depth: The level that fits into one tile.
        coarsest: The coarsest level that is served. It is finer than `depth` where the file has no coarse level of its
            own: one tile would need the whole slide to be read.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide, self.info = slide, slide.info
        self.close = weakref.finalize(self, slide.close)
        self.height, self.width = slide.shape
        self.depth = max(0, math.ceil(math.log2(max(self.height, self.width) / TILE)))
        images = [ScaledImage(slide, 2**level, smooth=False) for level in range(self.depth + 1)]
        shrunk = [2**level / slide.levels[image.level].downsample for level, image in enumerate(images)]
        self.coarsest = next((level - 1 for level, step in enumerate(shrunk) if step > MOST_STEP * 1.01), self.depth)
        self._images = images[: self.coarsest + 1]

    def shape(self, level: int) -> tuple[int, int]:
        """Height and width of a level. The last pixel may reach beyond the slide."""
        return -(-self.height // 2**level), -(-self.width // 2**level)

    def grid(self, level: int) -> tuple[int, int]:
        """Rows and columns of tiles of a level."""
        return grid_of(self.shape(level), TILE)

    def tile(self, level: int, row: int, column: int) -> Pixels:
        """The pixels of a tile; those of the last row and column have what is left."""
        if not 0 <= level <= self.coarsest:
            raise NotThere(f"there is no level {level}; there are 0 to {self.coarsest}")
        rows, columns = self.grid(level)
        if not (0 <= row < rows and 0 <= column < columns):
            raise NotThere(f"there is no tile {row}, {column}; level {level} has {rows} × {columns}")
        height, width = self.shape(level)
        y, x = row * TILE, column * TILE
        return _continued(self._images[level], y, x, min(TILE, height - y), min(TILE, width - x))

    def region(self, x: int, y: int, width: int, height: int) -> Pixels:
        """The pixels of a box at full resolution; what lies outside the slide is background."""
        if not (1 <= width <= MOST_REGION and 1 <= height <= MOST_REGION):
            raise BadNumber(f"a region of {width} × {height} px; its sides are 1 to {MOST_REGION}")
        if not (-width < x < self.width and -height < y < self.height):
            raise NotThere(f"a region at {x}, {y} lies outside the slide of {self.width} × {self.height} px")
        return self.slide.read(0, y, x, height, width)

    def thumbnail(self, side: int) -> Image.Image:
        """A small picture of the slide."""
        if self.coarsest < self.depth:
            raise NotThere("this slide has no coarse level: a small picture would need all of it to be read")
        picture = Image.fromarray(self.tile(self.depth, 0, 0))
        picture.thumbnail((side, side), Image.Resampling.BOX)
        return picture


def _continued(image: ScaledImage, y: int, x: int, height: int, width: int) -> Pixels:
    """A box of an image, continued by its border: the image may be rounded to a pixel less than the tiles cover."""
    top, left = min(y, image.shape[0] - 1), min(x, image.shape[1] - 1)
    bottom, right = max(min(y + height, image.shape[0]), top + 1), max(min(x + width, image.shape[1]), left + 1)
    pixels = image.read(top, left, bottom - top, right - left)
    missing = (height - pixels.shape[0], width - pixels.shape[1])
    return np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge") if any(missing) else pixels


def jpeg(pixels: Pixels | Image.Image) -> bytes:
    """A JPEG file."""
    return _encoded(pixels, "JPEG", quality=QUALITY)


def png(pixels: Pixels | Image.Image) -> bytes:
    """A PNG file, which has the pixels as they are."""
    return _encoded(pixels, "PNG", compress_level=1)


def _encoded(pixels: Pixels | Image.Image, kind: str, **options: int) -> bytes:
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.ascontiguousarray(pixels))
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


LAYER_TILE = 256
"""Positions a side of a tile of numbers."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A grid of numbers over a slide."""

    values: NDArray[Any]
    """(rows, columns)."""
    stride: float
    """Pixels of the slide's level 0 along one position."""
    classes: Sequence[str] = ()
    """Names of its values, where they are classes and not numbers."""

    @property
    def levels(self) -> int:
        """Number of levels until one fits into a tile; each has half the positions along each side."""
        levels = 1
        while max(self.values.shape) > LAYER_TILE * 2 ** (levels - 1):
            levels += 1
        return levels

    def level(self, level: int) -> NDArray[np.float32]:
        """The whole grid at a level."""
        return means(np.asarray(self.values), 2**level)

    def tile(self, level: int, row: int, column: int) -> NDArray[np.float32]:
        """The numbers of a tile; those of the last row and column have what is left."""
        self.check(level, row, column)
        reach = LAYER_TILE * 2**level
        part = self.values[row * reach : (row + 1) * reach, column * reach : (column + 1) * reach]
        return means(np.asarray(part), 2**level)

    def check(self, level: int, row: int, column: int) -> None:
        """Refuse a tile that there is none of."""
        if not 0 <= level < self.levels:
            raise NotThere(f"the layer has no level {level}; it has 0 to {self.levels - 1}")
        reach = LAYER_TILE * 2**level
        rows, columns = self.values.shape
        if not (0 <= row * reach < rows and 0 <= column * reach < columns):
            raise NotThere(f"the layer has no tile {row}, {column} at level {level}")

    def position(self, x: float, y: float) -> tuple[int, int]:
        """The row and the column of the position at a place of the slide."""
        row, column = int(y // self.stride), int(x // self.stride)
        if not (0 <= row < self.values.shape[0] and 0 <= column < self.values.shape[1]):
            raise NotThere(f"the layer has no position at {x:g}, {y:g}")
        return row, column

    def ranks(self) -> NDArray[np.float32]:
        """The rank of each position among all: one more than there are larger values. What is no number has none."""
        values = np.asarray(self.values, np.float64)
        ordered = np.sort(values[np.isfinite(values)])
        ranks = len(ordered) - np.searchsorted(ordered, values, side="right") + 1
        return np.where(np.isfinite(values), ranks, np.nan).astype(np.float32)

    def about(self) -> dict[str, Any]:
        """Facts by which the page draws the layer."""
        numbers = np.asarray(self.values)
        finite = numbers[np.isfinite(numbers)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        rows, columns = numbers.shape
        return {
            "rows": rows,
            "columns": columns,
            "stride": self.stride,
            "levels": self.levels,
            "low": low,
            "high": high,
        }


@dataclass(frozen=True, eq=False)
class LabelLayer(Layer):
    """A grid of classes over a slide, in levels that have each half the positions of the one before.

    A coarser position has one of the classes that it covers: labels have no mean.
    """

    pyramid: Sequence[Any] = ()
    """The arrays of the levels, `values` first, which stay in their files."""

    def tile(self, level: int, row: int, column: int) -> NDArray[np.float32]:
        self.check(level, row, column)
        known = min(level, len(self.pyramid) - 1)
        step = 2 ** (level - known)
        reach = LAYER_TILE * step
        part = self.pyramid[known][row * reach : (row + 1) * reach, column * reach : (column + 1) * reach]
        return np.ascontiguousarray(np.asarray(part)[::step, ::step], dtype=np.float32)

    def about(self) -> dict[str, Any]:
        shown = [PathClass.of(name, number) for number, name in enumerate(self.classes)]
        rows, columns = self.values.shape
        return {
            "rows": rows, "columns": columns, "stride": self.stride, "levels": self.levels,
            "low": 0.0, "high": float(len(shown) - 1),
            "classes": [{"name": one.name, "colour": list(one.colour)} for one in shown],
        }  # fmt: skip


def means(values: NDArray[Any], side: int) -> NDArray[np.float32]:
    """Means over squares of `side` × `side`; those at the border are over what is there."""
    if side == 1:
        return np.ascontiguousarray(values, dtype=np.float32)
    rows, columns = (np.arange(0, size, side) for size in values.shape)
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0, dtype=np.float64), columns, axis=1)
    heights, widths = (
        np.diff(np.append(starts, size)) for starts, size in zip((rows, columns), values.shape, strict=True)
    )
    return (sums / (heights[:, None] * widths)).astype(np.float32)
