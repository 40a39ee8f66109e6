"""A slide cut into the chunks of a store, each tile of the slide decoded once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .readers import Reader
from .readers.protocol import to_planes
from .resample import ScaledImage
from .scratch import scratch
from .store.layout import CHANNELS, FILL
from .store.writer import Planes
from .tissue import TissueMask

_BAND = 4  # rows of chunks that are read at once where borders are decoded twice

Piece = tuple[int, int, Planes]
"""Top and left in the box, and pixels, which the next piece overwrites."""


class ChunkCutter:
    """Reads boxes of level 0 chunk by chunk.

    Args:
        reader: The slide.
        image: The slide at the resolution of the store.
        chunk: Pixels a side of a chunk.
        tissue: All that is outside becomes the fill value; None keeps everything.
    """

    def __init__(self, reader: Reader, image: ScaledImage, chunk: int, tissue: TissueMask | None) -> None:
        self._image, self._size, self._tissue = image, chunk, tissue
        rows, columns = map(int, reader.info.details.get("tile", "1x1").split("x"))
        whole_rows = image.is_exact and chunk % rows == 0
        # Where tiles of the slide or margins of the filter reach over the border of a band, they are decoded for
        # both bands, so bands are higher there.
        self._band = chunk if whole_rows else _BAND * chunk
        self._single = image.has_planes and whole_rows and chunk % columns == 0

    def cut(self, y: int, x: int, height: int, width: int) -> Iterator[Piece]:
        """The chunks of a box, but for those that become background, which are not read either."""
        for top, left, planes in (self._one_by_one if self._single else self._in_bands)(y, x, height, width):
            if self._tissue is not None:
                tissue = self._tissue.cover(y + top, x + left, *planes.shape[1:])
                if not tissue.any():
                    continue
                if not tissue.all():
                    planes[:, ~tissue] = FILL
            yield top, left, planes

    def _one_by_one(self, y: int, x: int, height: int, width: int) -> Iterator[Piece]:
        """Chunks of whole tiles, decoded straight into planes."""
        for top in range(0, height, self._size):
            for left in range(0, width, self._size):
                extent = (min(self._size, height - top), min(self._size, width - left))
                if self._tissue is None or self._tissue.any_in(y + top, x + left, *extent):
                    planes = scratch("planes", CHANNELS, *extent)
                    self._image.read_planes(y + top, x + left, planes)
                    yield top, left, planes

    def _in_bands(self, y: int, x: int, height: int, width: int) -> Iterator[Piece]:
        """Chunks cut from bands, which are read at once."""
        size = self._size
        for top in range(0, height, self._band):
            rows = min(self._band, height - top)
            for left, columns in self._runs(y + top, x, rows, width):
                part = self._image.read(y + top, x + left, rows, columns)
                for row in range(0, rows, size):
                    for column in range(0, columns, size):
                        piece = part[row : row + size, column : column + size]
                        planes = to_planes(piece, scratch("planes", CHANNELS, *piece.shape[:2]))
                        yield top + row, left + column, planes

    def _runs(self, y: int, x: int, height: int, width: int) -> Iterator[tuple[int, int]]:
        """Starts and widths of the parts of a band to read: all of it, or neighbouring chunks with tissue."""
        if self._tissue is None:
            yield 0, width
            return
        size = self._size
        wanted = [self._tissue.any_in(y, x + at, height, min(size, width - at)) for at in range(0, width, size)]
        for has_tissue, run in groupby(range(len(wanted)), wanted.__getitem__):
            places = list(run)
            if has_tissue:
                yield places[0] * size, min((places[-1] + 1) * size, width) - places[0] * size
