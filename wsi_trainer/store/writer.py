"""Writing the pyramid of an image shard by shard, with a few shards in memory and every finished one kept.

A shard of level 0 is halved chunk by chunk to its quarter of the shard of level 1, which is made in the same task.
Coarser levels are made from what was written of the level below, which holds a quarter of the pixels or less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_trainer.io.files import replace_file
from wsi_trainer.slide.formats.base import CHANNELS, FILL, to_planes
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.store.chunks import Layout, ShardEncoder, StoredLevel, ZstdCodec, encode_shard, shard_key
from wsi_trainer.store.manifest import Entry, Journal, files_of

Planes = NDArray[np.uint8]
"""Pixels as channel, y, x."""

ReadChunks = Callable[[int, int, int, int], Iterable[tuple[int, int, Planes]]]
"""The pixels of a box of level 0 chunk by chunk, each with its top and left in the box; chunks that are left out hold
the fill value."""


class PyramidWriter:
    """Makes all shards of a store that the journal does not have yet."""

    def __init__(
        self,
        store: Path,
        shapes: list[tuple[int, int]],
        read: ReadChunks,
        journal: Journal,
        layout: Layout,
        codec: ZstdCodec,
        *,
        threads: int = 1,
        progress: Callable[[int], None] = lambda pixels: None,
    ) -> None:
        self._store, self._shapes, self._read = store, shapes, read
        self._journal, self._layout, self._codec = journal, layout, codec
        self._threads, self._progress = max(1, threads), progress
        self._grids = [layout.grid(*shape) for shape in shapes]

    def run(self) -> None:
        """Makes what is missing. Raises what a reader raises; what was finished stays."""
        first = min(1, len(self._shapes) - 1)
        with ThreadPoolExecutor(self._threads) as pool:
            for level in range(first, len(self._shapes)):
                rows, columns = map(range, self._grids[level])
                cells = [
                    (level, row, column) for row in rows for column in columns if self._is_open(level, row, column)
                ]
                for _ in pool.map(self._make, *zip(*cells)):
                    pass

    def _is_done(self, level: int, row: int, column: int) -> bool:
        return shard_key(level, row, column) in self._journal.entries

    def _is_open(self, level: int, row: int, column: int) -> bool:
        """True if a shard is to be made, or one of level 0 below one of level 1."""
        below = self._below(level, row, column) if level == 1 else []
        return not all(self._is_done(*cell) for cell in [(level, row, column), *below])

    def _below(self, level: int, row: int, column: int) -> list[tuple[int, int, int]]:
        rows, columns = self._grids[level - 1]
        cells = [(2 * row + dr, 2 * column + dc) for dr in (0, 1) for dc in (0, 1)]
        return [(level - 1, r, c) for r, c in cells if r < rows and c < columns]

    def _make(self, level: int, row: int, column: int) -> None:
        """Makes a shard: of level 1 with those below it, of a coarser one from those below it."""
        if level == 0:
            self._make_level0(row, column, None)
            return
        *_, height, width = self._box(level, row, column)
        side = self._layout.shard // 2
        pixels = None
        if not self._is_done(level, row, column):
            pixels = np.full((CHANNELS, height, width), FILL, np.uint8)
        for below in self._below(level, row, column):
            _, r, c = below
            quarter = None if pixels is None else pixels[:, r % 2 * side :, c % 2 * side :]
            if level == 1 and not self._is_done(*below):
                self._make_level0(r, c, quarter)
            elif quarter is not None and self._journal.entries[shard_key(*below)].sha256 is not None:
                stored = StoredLevel(self._store / str(level - 1), self._shapes[level - 1], self._layout, self._codec)
                halve(stored.read(*self._box(*below)), quarter)
        if pixels is not None:
            self._write(level, row, column, encode_shard(pixels, self._layout, self._codec))

    def _make_level0(self, row: int, column: int, half: Planes | None) -> None:
        """Reads a shard of level 0, encodes and halves it, chunk by chunk: each stays in the processor's cache."""
        encoder = ShardEncoder(self._layout, self._codec)
        y, x, height, width = self._box(0, row, column)
        size, left_to_do = self._layout.chunk, height * width
        for top, left, planes in self._read(y, x, height, width):
            if half is not None:
                halve(planes, half[:, top // 2 :, left // 2 :])
            encoder.add(top // size, left // size, planes)
            pixels = planes.shape[1] * planes.shape[2]
            self._progress(pixels)
            left_to_do -= pixels
        self._progress(left_to_do)
        self._write(0, row, column, encoder.parts())

    def _box(self, level: int, row: int, column: int) -> tuple[int, int, int, int]:
        side = self._layout.shard
        y, x = row * side, column * side
        return y, x, min(side, self._shapes[level][0] - y), min(side, self._shapes[level][1] - x)

    def _write(self, level: int, row: int, column: int, parts: list[bytes]) -> None:
        key = shard_key(level, row, column)
        if not parts:
            self._journal.add(Entry(key))
            return
        seal = hashlib.sha256()
        for part in parts:
            seal.update(part)
        path = self._store / key
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, *parts)
        self._journal.add(Entry(key, sum(map(len, parts)), seal.hexdigest()))


def halve(pixels: Planes, out: Planes | None = None) -> Planes:
    """Means over 2 x 2 pixels of planes (c, y, x), halves rounded up; a last odd row or column is continued by itself.

    An array that is given may be larger: its upper left part is filled.
    """
    channels, height, width = pixels.shape
    if out is None:
        out = np.empty((channels, -(-height // 2), -(-width // 2)), np.uint8)
    for plane, half in zip(pixels, out):
        half[: -(-height // 2), : -(-width // 2)] = Image.fromarray(plane).reduce(2)
    return out


def drop_missing(store: Path, journal: Journal) -> None:
    """Forgets journal entries whose file is not there in full, and files without an entry."""
    for key, entry in list(journal.entries.items()):
        path = store / key
        size = path.stat().st_size if path.is_file() else -1
        if entry.sha256 is not None and size != entry.size:
            del journal.entries[key]
    for key in files_of(store) - journal.entries.keys():
        (store / key).unlink()


_BAND = 4  # rows of chunks that are read at once where borders are decoded twice

Piece = tuple[int, int, Planes]
"""Top and left in the box, and pixels."""


class ChunkCutter:
    """Reads boxes of level 0 chunk by chunk.

    Args:
        slide: The slide.
        image: The slide at the resolution of the store.
        chunk: Pixels a side of a chunk.
        tissue: All that is outside becomes the fill value; None keeps everything.
    """

    def __init__(self, slide: Slide, image: ScaledImage, chunk: int, tissue: TissueMask | None) -> None:
        self._image, self._size, self._tissue = image, chunk, tissue
        rows = int(slide.info.details.get("tile", "1x1").split("x")[0])
        whole_rows = image.is_exact and chunk % rows == 0
        # Where tiles of the slide or margins of the filter reach over the border of a band, they are decoded for
        # both bands, so bands are higher there.
        self._band = chunk if whole_rows else _BAND * chunk

    def cut(self, y: int, x: int, height: int, width: int) -> Iterator[Piece]:
        """The chunks of a box, but for those that become background, which are not read either."""
        for top, left, planes in self._in_bands(y, x, height, width):
            if self._tissue is not None:
                tissue = self._tissue.cover(y + top, x + left, *planes.shape[1:])
                if not tissue.any():
                    continue
                if not tissue.all():
                    planes[:, ~tissue] = FILL
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
                        planes = to_planes(piece, np.empty((CHANNELS, *piece.shape[:2]), np.uint8))
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
