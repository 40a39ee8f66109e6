"""The bytes of a shard: its chunks one after the other, and at the end an index of where each one lies.

This is zarr's `sharding_indexed` codec, written and read whole shards at a time. zarr-python does the same at
less than half the speed, because it goes through its pipeline chunk by chunk.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..whole_reads import read_at
from .codec import CorruptChunk, ZstdCodec, with_checksum, without_checksum
from .layout import FILL, Layout

ABSENT = np.uint64(2**64 - 1)
Index = NDArray[np.uint64]
"""Rows x columns x (offset, length); ABSENT for a chunk that holds the fill value only."""


class ShardEncoder:
    """Makes the bytes of one shard, of chunks (c, y, x) that come one after the other."""

    def __init__(self, layout: Layout, codec: ZstdCodec, fill: int = FILL) -> None:
        self._layout, self._codec, self._fill = layout, codec, fill
        self._index: Index = np.full((layout.chunks_aside, layout.chunks_aside, 2), ABSENT, np.uint64)
        self._parts: list[bytes] = []
        self._offset = 0

    def add(self, row: int, column: int, chunk: NDArray[np.uint8]) -> None:
        """Encodes a chunk, unless all of it is the fill value. At the border of the image it may be smaller."""
        if chunk[0, 0, 0] == self._fill and (chunk == self._fill).all():
            return
        data = self._codec.encode(_whole(chunk, self._layout.chunk, self._fill))
        self._index[row, column] = self._offset, len(data)
        self._parts.append(data)
        self._offset += len(data)

    def parts(self) -> list[bytes]:
        """The bytes, in parts; none if all chunks are the fill value."""
        return [*self._parts, with_checksum(self._index.astype("<u8").tobytes())] if self._parts else []


def encode_shard(pixels: NDArray[np.uint8], layout: Layout, codec: ZstdCodec, fill: int = FILL) -> list[bytes]:
    """The bytes, in parts, of the shard with these pixels (c, y, x); none if all are the fill value.

    The array may be smaller than a shard, at the border of the image; what is missing is the fill value.
    """
    size = layout.chunk
    encoder = ShardEncoder(layout, codec, fill)
    for row in range(-(-pixels.shape[1] // size)):
        for column in range(-(-pixels.shape[2] // size)):
            encoder.add(row, column, pixels[:, row * size : (row + 1) * size, column * size : (column + 1) * size])
    return encoder.parts()


def _whole(chunk: NDArray[np.uint8], size: int, fill: int) -> NDArray[np.uint8]:
    if chunk.shape[1:] == (size, size):
        return chunk
    whole = np.full((chunk.shape[0], size, size), fill, np.uint8)
    whole[:, : chunk.shape[1], : chunk.shape[2]] = chunk
    return whole


def read_index(path: Path, layout: Layout) -> Index | None:
    """The index of a shard, or None if there is no such file.

    Raises:
        CorruptChunk: The file was cut or changed.
    """
    aside = layout.chunks_aside
    length = aside * aside * 16 + 4
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size < length:
            raise CorruptChunk(f"{path}: {size} bytes are too few for a shard")
        tail = np.frombuffer(read_at(fd, length, size - length), np.uint8)
    finally:
        os.close(fd)
    try:
        body = without_checksum(tail)
    except CorruptChunk as error:
        raise CorruptChunk(f"{path}: index of the shard: {error}") from error
    return body.view("<u8").reshape(aside, aside, 2)
