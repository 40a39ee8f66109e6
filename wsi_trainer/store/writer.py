"""Writing the pyramid of an image shard by shard, with a few shards in memory and every finished one kept.

Shards are made in Z-order, and each is halved straight to its quarter of the shard above it. As soon as the four
quarters are there, that one is complete, so no pixel is read, decoded or copied twice, except after an interruption.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import Semaphore

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.io.files import replace_file
from wsi_trainer.slide.formats.base import scratch, to_planes
from wsi_trainer.slide.resample import ScaledImage, halve
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.store.chunks import ShardEncoder, StoredLevel, ZstdCodec, encode_shard
from wsi_trainer.store.journal import Entry, Journal
from wsi_trainer.store.layout import CHANNELS, FILL, Layout, shard_key, z_order
from wsi_trainer.store.manifest import files_of

Planes = NDArray[np.uint8]
"""Pixels as channel, y, x."""

ReadChunks = Callable[[int, int, int, int], Iterable[tuple[int, int, Planes]]]
"""The pixels of a box of level 0 chunk by chunk, each with its top and left in the box; the next chunk may
overwrite them. What is left out is the fill value."""


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
        self._complete = self._find_complete()
        self._unfinished: dict[tuple[int, int, int], Planes] = {}  # shards of which some quarters are there
        self._lock = threading.Lock()

    def run(self) -> None:
        """Makes what is missing. Raises what a reader raises; what was finished stays."""
        top = len(self._shapes) - 1
        # Hashing and writing go on beside the work on pixels, which would wait for the disk.
        with ThreadPoolExecutor(self._threads) as pool, ThreadPoolExecutor(1) as disk:
            self._pool, self._disk = pool, disk
            self._unwritten = Semaphore(2 * self._threads)
            self._room = Semaphore(2 * self._threads)
            self._pending: list[Future[None]] = []
            self._ahead = self._level0()
            try:
                for row, column in z_order(*self._grids[top]):
                    self._make(top, row, column, wanted=False)
                pool.shutdown()
                disk.shutdown()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                disk.shutdown(cancel_futures=True)
                raise
            for future in self._pending:
                future.result()

    # -- what is there already

    def _find_complete(self) -> set[tuple[int, int, int]]:
        """Shards that are done together with all below them."""
        complete: set[tuple[int, int, int]] = set()
        for level, grid in enumerate(self._grids):
            for row in range(grid[0]):
                for column in range(grid[1]):
                    below = self._below(level, row, column)
                    if self._is_done(level, row, column) and all(cell in complete for cell in below):
                        complete.add((level, row, column))
        return complete

    def _is_done(self, level: int, row: int, column: int) -> bool:
        return shard_key(level, row, column) in self._journal.entries

    def _below(self, level: int, row: int, column: int) -> list[tuple[int, int, int]]:
        if level == 0:
            return []
        rows, columns = self._grids[level - 1]
        cells = [(2 * row + dr, 2 * column + dc) for dr in (0, 1) for dc in (0, 1)]
        return [(level - 1, r, c) for r, c in cells if r < rows and c < columns]

    # -- making shards

    def _make(self, level: int, row: int, column: int, wanted: bool) -> bool:
        """Makes a shard and all below it, and its half if that is wanted; whether it is more than the fill value."""
        if (level, row, column) in self._complete:
            return wanted and self._half_again(level, row, column)
        if level == 0:
            return next(self._ahead).result()
        done = self._is_done(level, row, column)
        quarters = [(cell, self._make(*cell, wanted=wanted or not done)) for cell in self._below(level, row, column)]
        pixels = self._assemble(level, row, column, quarters)
        if not done or wanted:
            self._halve(level, row, column, pixels)
        if not done:
            self._encode_later(level, row, column, pixels)
        return pixels is not None

    def _halve(self, level: int, row: int, column: int, pixels: Planes | None) -> None:
        if pixels is not None and level + 1 < len(self._shapes):
            halve(pixels, self._quarter(level, row, column))

    def _quarter(self, level: int, row: int, column: int) -> Planes:
        """Where a shard's half belongs in the one above it."""
        above = (level + 1, row // 2, column // 2)
        with self._lock:
            if above not in self._unfinished:
                _, _, height, width = self._box(*above)
                self._unfinished[above] = np.empty((CHANNELS, height, width), np.uint8)
            return self._part(self._unfinished[above], row, column)

    def _part(self, pixels: Planes, row: int, column: int) -> Planes:
        side = self._layout.shard // 2
        y, x = row % 2 * side, column % 2 * side
        return pixels[:, y : y + side, x : x + side]

    def _level0(self) -> Iterator[Future[bool]]:
        """The missing shards of level 0 in Z-order, a few of them ahead of the one that is asked for."""
        cells = iter([cell for cell in z_order(*self._grids[0]) if (0, *cell) not in self._complete])
        queue: deque[Future[bool]] = deque()
        while True:
            while len(queue) <= self._threads and (cell := next(cells, None)) is not None:
                queue.append(self._pool.submit(self._make_level0, *cell))
            if not queue:
                return
            yield queue.popleft()

    def _make_level0(self, row: int, column: int) -> bool:
        """Reads a shard of level 0, encodes it and halves it, chunk by chunk: each stays in the processor's cache.

        Whether it is more than the fill value.
        """
        encoder = ShardEncoder(self._layout, self._codec)
        y, x, height, width = self._box(0, row, column)
        size, left_to_do, found = self._layout.chunk, height * width, False
        empty = {(top, left) for top in range(0, height, size) for left in range(0, width, size)}
        half: Planes | None = None
        for top, left, planes in self._read(y, x, height, width):
            found = True
            if half is None and len(self._shapes) > 1:
                half = self._quarter(0, row, column)
            if half is not None:
                halve(planes, half[:, top // 2 :, left // 2 :])
            empty.remove((top, left))
            pixels = planes.shape[1] * planes.shape[2]
            encoder.add(top // size, left // size, planes)
            self._progress(pixels)
            left_to_do -= pixels
        if half is not None:
            for top, left in empty:
                half[:, top // 2 : (top + size) // 2, left // 2 : (left + size) // 2] = FILL
        self._progress(left_to_do)
        self._write_later(0, row, column, encoder.parts())
        return found

    def _box(self, level: int, row: int, column: int) -> tuple[int, int, int, int]:
        side = self._layout.shard
        y, x = row * side, column * side
        return y, x, min(side, self._shapes[level][0] - y), min(side, self._shapes[level][1] - x)

    def _assemble(
        self, level: int, row: int, column: int, quarters: list[tuple[tuple[int, int, int], bool]]
    ) -> Planes | None:
        """A shard of which all quarters are there; None stands for the fill value."""
        with self._lock:
            pixels = self._unfinished.pop((level, row, column), None)
        if pixels is not None:
            for (_, r, c), found in quarters:
                if not found:
                    self._part(pixels, r, c)[...] = FILL
        return pixels

    def _encode_later(self, level: int, row: int, column: int, pixels: Planes | None) -> None:
        """Encodes in the pool, where there is room, so that this thread goes on."""
        self._room.acquire()
        future = self._pool.submit(self._encode_and_write, level, row, column, pixels)
        future.add_done_callback(lambda _: self._room.release())
        self._wait_for(future)

    def _wait_for(self, future: Future[None]) -> None:
        """Notes a future of which only an error matters, and raises one that came up meanwhile."""
        with self._lock:
            done = [f for f in self._pending if f.done()]
            self._pending = [*(f for f in self._pending if not f.done()), future]
        for earlier in done:
            earlier.result()

    def _encode_and_write(self, level: int, row: int, column: int, pixels: Planes | None) -> None:
        parts = [] if pixels is None else encode_shard(pixels, self._layout, self._codec)
        self._write_later(level, row, column, parts)

    def _write_later(self, level: int, row: int, column: int, parts: list[bytes]) -> None:
        """Hashes and writes in the thread for that, with few shards waiting for it."""
        self._unwritten.acquire()
        future = self._disk.submit(self._write, level, row, column, parts)
        future.add_done_callback(lambda _: self._unwritten.release())
        self._wait_for(future)

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

    def _half_again(self, level: int, row: int, column: int) -> bool:
        """The half of a shard that an earlier run made."""
        if self._journal.entries[shard_key(level, row, column)].sha256 is None:
            return False
        stored = StoredLevel(self._store / str(level), self._shapes[level], self._layout, self._codec)
        self._halve(level, row, column, stored.read(*self._box(level, row, column)))
        return True


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
"""Top and left in the box, and pixels, which the next piece overwrites."""


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
        rows, columns = map(int, slide.info.details.get("tile", "1x1").split("x"))
        whole_rows = image.is_exact and chunk % rows == 0
        # Where tiles of the slide or margins of the filter reach over the border of a band, they are decoded for
        # both bands, so bands are higher there.
        self._band = chunk if whole_rows else _BAND * chunk
        self._single = image.is_exact and slide.direct and whole_rows and chunk % columns == 0

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
                    self._image.read_into(y + top, x + left, planes)
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
