"""One level of a stored image: boxes read chunk by chunk, and boxes that are known to be constant."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order import room
from ..scratch import beside_alignment, new_beside_alignment, scratch
from ..whole_reads import read_into
from .codec import CorruptChunk, ZstdCodec
from .layout import CHANNELS, FILL, Layout
from .shard import ABSENT, Index, read_index


class StoredLevel:
    """An array (c, y, x) of a store that this package wrote. It holds no open file: fork or pickle it.

    Args:
        path: The folder of the array.
        shape: Height and width.
        layout: Sizes of chunks and shards.
        codec: What decodes chunks.
        listed: The shards that the store's manifest lists; one of them that is absent is damage and not background.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], layout: Layout, codec: ZstdCodec | None = None,
        listed: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:  # fmt: skip
        self.path = path
        self.shape = shape
        self.layout = layout
        self._codec = codec or ZstdCodec()
        self._listed = listed
        self._indexes: dict[tuple[int, int], Index | None] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[StoredLevel], tuple[Any, ...]]:
        return StoredLevel, (self.path, self.shape, self.layout, self._codec, self._listed)

    def shard_path(self, row: int, column: int) -> Path:
        """The file of a shard, which is absent if the shard holds the fill value only."""
        return Path(self._file(row, column))

    def _file(self, row: int, column: int) -> str:
        return f"{self.path}/c/0/{row}/{column}"  # joining paths would take as long as reading the index

    def index(self, row: int, column: int) -> Index | None:
        """The index of a shard, kept after the first time: a kilobyte each."""
        key = (row, column)
        if key not in self._indexes:
            index = read_index(self.shard_path(row, column), self.layout)
            if index is None and key in self._listed:
                raise CorruptChunk(f"{self._file(row, column)} is missing")
            with self._lock:
                self._indexes[key] = index
        return self._indexes[key]

    def is_absent(self, row: int, column: int) -> bool:
        """Whether a chunk, by its row and column in the image, holds the fill value only."""
        aside = self.layout.chunks_aside
        index = self.index(row // aside, column // aside)
        return index is None or bool(index[row % aside, column % aside, 0] == ABSENT)

    def chunks(self, y: int, x: int, height: int, width: int) -> list[tuple[int, int]]:
        """Rows and columns of the chunks that a box inside the image touches."""
        size = self.layout.chunk
        rows = range(y // size, (y + height - 1) // size + 1)
        columns = range(x // size, (x + width - 1) // size + 1)
        return [(row, column) for row in rows for column in columns]

    def is_fill(self, y: int, x: int, height: int, width: int) -> bool:
        """Whether all chunks that a box inside the image touches are absent."""
        return all(self.is_absent(row, column) for row, column in self.chunks(y, x, height, width))

    def chunk(self, row: int, column: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8] | None:
        """The pixels of a chunk, in `out` if that is given, or None if the chunk is absent.

        Raises:
            CorruptChunk: Its bytes are not those that were written; names the file.
        """
        aside, size = self.layout.chunks_aside, self.layout.chunk
        index = self.index(row // aside, column // aside)
        if index is None or index[row % aside, column % aside, 0] == ABSENT:
            return None
        offset, length = index[row % aside, column % aside].tolist()
        path = self._file(row // aside, column // aside)
        if length > 2 * CHANNELS * size * size:  # no codec makes so much of a chunk: do not ask for the memory
            raise CorruptChunk(f"{path}: chunk {row % aside}, {column % aside} has {length} bytes in the index")
        fd = os.open(path, os.O_RDONLY)
        try:
            data: Any = scratch("encoded", length)
            data = data[: read_into(fd, data, offset)]
        finally:
            os.close(fd)
        try:
            return self._codec.decode(data, self._room(new_beside_alignment(self._bytes)) if out is None else out)
        except CorruptChunk as error:
            raise CorruptChunk(f"{path}: chunk {row % aside}, {column % aside} of the shard: {error}") from error

    def read(self, y: int, x: int, height: int, width: int) -> NDArray[np.uint8]:
        """The pixels (c, y, x) of a box inside the image."""
        out = room("planes", CHANNELS, height, width)
        for row, column in self.chunks(y, x, height, width):
            self.paste(row, column, out, y, x)
        return out

    def paste(self, row: int, column: int, out: NDArray[np.uint8], y: int, x: int) -> None:
        """Decodes a chunk into the box whose corner is (y, x), through memory that stays in the processor's cache."""
        kept = self._room(beside_alignment("chunk", self._bytes))
        paste(out, self.chunk(row, column, kept), self.layout.chunk, row, column, y, x)

    @property
    def _bytes(self) -> int:
        """Of the pixels of a chunk."""
        return CHANNELS * self.layout.chunk**2

    def _room(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Memory as a chunk, in the order in which decoding makes pixels: straight into it."""
        return room("planes", CHANNELS, self.layout.chunk, self.layout.chunk, memory=memory)


def paste(
    out: NDArray[np.uint8], chunk: NDArray[np.uint8] | None, size: int, row: int, column: int, y: int, x: int
) -> None:
    """Copies the part of a chunk that lies in the box whose corner is (y, x)."""
    top, left = max(row * size, y), max(column * size, x)
    bottom = min((row + 1) * size, y + out.shape[1])
    right = min((column + 1) * size, x + out.shape[2])
    target = out[:, top - y : bottom - y, left - x : right - x]
    if chunk is None:
        target[...] = FILL
    else:
        target[...] = chunk[:, top - row * size : bottom - row * size, left - column * size : right - column * size]
