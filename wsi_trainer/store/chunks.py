"""Chunks of 512 px in shards of 4096 px: zstd, which every zarr v3 reader knows, a checksum, and an index of chunks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from wsi_trainer.slide.formats.base import CHANNELS, FILL, read_at

Chunk = NDArray[np.uint8]
Bytes = NDArray[np.uint8]
"""Encoded bytes, in one dimension."""

_CHECKSUM = 4  # bytes


@dataclass(frozen=True)
class Layout:
    """Sizes in pixels of chunks, which are read, and of shards, which are written and are files."""

    chunk: int = 512
    shard: int = 4096

    def __post_init__(self) -> None:
        if self.chunk < 2 or self.chunk % 2 or self.shard % self.chunk:
            raise ValueError(f"chunk={self.chunk} must be even, and shard={self.shard} a multiple of it")

    @property
    def chunks_aside(self) -> int:
        """Chunks along one side of a shard."""
        return self.shard // self.chunk

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of shards that cover an image."""
        return -(-height // self.shard), -(-width // self.shard)


def pyramid(height: int, width: int, levels: int | None = None, smallest: int = 512) -> list[tuple[int, int]]:
    """Shapes of the levels, finest first: until one fits into `smallest`, or as many as asked for."""
    shapes = [(height, width)]
    while len(shapes) < levels if levels is not None else max(shapes[-1]) > smallest:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


def shard_key(level: int, row: int, column: int) -> str:
    """The path of a shard inside the store."""
    return f"{level}/c/0/{row}/{column}"


class CorruptChunk(Exception):
    """The bytes of a chunk are not those that were written."""


def with_checksum(data: bytes | bytearray) -> bytes:
    """Data followed by its CRC-32C, as zarr's codec `crc32c` writes it."""
    return b"".join((data, int(google_crc32c.value(data)).to_bytes(_CHECKSUM, "little")))


def without_checksum(data: Bytes) -> Bytes:
    """Data without its checksum, if that is right: a view, not a copy."""
    if len(data) < _CHECKSUM:
        raise CorruptChunk(f"{len(data)} bytes are too few for a checksum")
    body, stored = data[:-_CHECKSUM], int.from_bytes(bytes(data[-_CHECKSUM:]), "little")
    if google_crc32c.value(body) != stored:
        raise CorruptChunk("the checksum (CRC-32C) does not match")
    return body


@dataclass(frozen=True)
class ZstdCodec:
    """Lossless, at one of zstd's levels."""

    level: int = 3

    def encode(self, chunk: Chunk) -> bytes:
        """The bytes of one chunk (c, y, x)."""
        raw: Any = np.ascontiguousarray(chunk).data
        return with_checksum(imagecodecs.zstd_encode(raw, level=self.level))

    def decode(self, data: Bytes, out: Chunk) -> Chunk:
        """Fills `out` with the chunk of these bytes."""
        body: Any = without_checksum(data)
        try:
            imagecodecs.zstd_decode(body, out=out.reshape(-1).data)
        except imagecodecs.ZstdError as error:
            raise CorruptChunk(str(error)) from error
        return out

    def metadata(self) -> list[dict[str, Any]]:
        """The codecs inside a shard, as they stand in zarr.json."""
        return [
            {"name": "bytes"},
            {"name": "zstd", "configuration": {"level": self.level, "checksum": False}},
            {"name": "crc32c"},
        ]


def codec_of(metadata: list[dict[str, Any]]) -> ZstdCodec:
    """The codec that wrote this metadata.

    Raises:
        ValueError: It is none of this package's.
    """
    by_name = {entry["name"]: entry.get("configuration", {}) for entry in metadata}
    codec = ZstdCodec(by_name["zstd"]["level"])
    if codec.metadata() != metadata:
        raise ValueError(f"unknown codecs {[entry['name'] for entry in metadata]}")
    return codec


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
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < length:
                raise CorruptChunk(f"{path}: {size} bytes are too few for a shard")
            tail = read_at(file.fileno(), length, size - length)
    except FileNotFoundError:
        return None
    try:
        body = without_checksum(np.frombuffer(tail, np.uint8))
    except CorruptChunk as error:
        raise CorruptChunk(f"{path}: index of the shard: {error}") from error
    return body.view("<u8").reshape(aside, aside, 2)


class StoredLevel:
    """An array (c, y, x) of a store that this package wrote. It holds no open file.

    Args:
        path: The folder of the array.
        shape: Height and width.
        layout: Sizes of chunks and shards.
        codec: Decoder of chunks.
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
            self._indexes[key] = index
        return self._indexes[key]

    def is_absent(self, row: int, column: int) -> bool:
        """True if a chunk, by its row and column in the image, holds the fill value only."""
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
        """True if all chunks that a box inside the image touches are absent."""
        return all(self.is_absent(row, column) for row, column in self.chunks(y, x, height, width))

    def read(self, y: int, x: int, height: int, width: int) -> NDArray[np.uint8]:
        """The pixels (c, y, x) of a box inside the image."""
        out = np.empty((CHANNELS, height, width), np.uint8)
        self.read_into(y, x, out)
        return out

    def read_into(self, y: int, x: int, out: NDArray[np.uint8]) -> None:
        """Fills an array with the box inside the image whose corner is (y, x).

        Raises:
            CorruptChunk: Bytes of a chunk are not those that were written; names the file.
        """
        size = self.layout.chunk
        for row, column in self.chunks(y, x, *out.shape[1:]):
            top, left = max(row * size, y), max(column * size, x)
            bottom, right = min((row + 1) * size, y + out.shape[1]), min((column + 1) * size, x + out.shape[2])
            target = out[:, top - y : bottom - y, left - x : right - x]
            if self.is_absent(row, column):
                target[...] = FILL
            elif target.shape[1:] == (size, size) and target.flags.c_contiguous:
                self._decode(row, column, target)
            else:
                chunk = self._decode(row, column, np.empty((CHANNELS, size, size), np.uint8))
                y0, x0 = row * size, column * size
                target[...] = chunk[:, top - y0 : bottom - y0, left - x0 : right - x0]

    def _decode(self, row: int, column: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fills an array with a chunk that is there."""
        aside, size = self.layout.chunks_aside, self.layout.chunk
        index = self.index(row // aside, column // aside)
        assert index is not None
        offset, length = index[row % aside, column % aside].tolist()
        path = self._file(row // aside, column // aside)
        if length > 2 * CHANNELS * size * size:  # no codec makes so much of a chunk: do not ask for the memory
            raise CorruptChunk(f"{path}: chunk {row % aside}, {column % aside} has {length} bytes in the index")
        with open(path, "rb", buffering=0) as file:
            data = np.frombuffer(read_at(file.fileno(), length, offset), np.uint8)
        try:
            return self._codec.decode(data, out)
        except CorruptChunk as error:
            raise CorruptChunk(f"{path}: chunk {row % aside}, {column % aside} of the shard: {error}") from error
