"""A slide as square tiles, at its own resolution and at every half of it.

Level 0 has the pixels of the file, and each further level half as many along each side. A tile is read when it is asked
for, from the coarsest level of the file that is fine enough.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image

from wsi_trainer.slide.formats.base import Pixels
from wsi_trainer.slide.resample import ScaledImage
from wsi_trainer.slide.slide import Slide
from wsi_trainer.view.refusals import BadNumber, NotThere

TILE = 512
"""Pixels a side: the chunk of a store."""
MOST_STEP = 8
"""How much a tile may be shrunk from the level of the file that it is read from: 4096 × 4096 pixels for one tile."""
MOST_REGION = 1024
"""Pixels a side of a region at full resolution."""
QUALITY = 90


class TiledSlide:
    """An open slide and its tiles.

    Attributes:
        depth: The level that fits into one tile.
        coarsest: The coarsest level that is served. It is finer than `depth` where the file has no coarse level of its
            own: one tile would need the whole slide to be read.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide, self.info = slide, slide.info
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
        height, width = self.shape(level)
        return -(-height // TILE), -(-width // TILE)

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

    def whole(self, level: int) -> Pixels:
        """All pixels of a level."""
        return _continued(self._images[level], 0, 0, *self.shape(level))

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

    def close(self) -> None:
        self.slide.close()


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
