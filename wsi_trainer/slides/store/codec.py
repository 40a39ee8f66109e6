"""How the bytes of a chunk are made and read: zstd with a checksum, as every zarr v3 reader knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np
from numpy.typing import NDArray

Chunk = NDArray[np.uint8]

_CHECKSUM = 4  # bytes


class CorruptChunk(Exception):
    """The bytes of a chunk are not those that were written."""


def with_checksum(data: bytes) -> bytes:
    """Data followed by its CRC-32C, as zarr's codec `crc32c` writes it."""
    return data + int(google_crc32c.value(data)).to_bytes(_CHECKSUM, "little")


def without_checksum(data: bytes) -> bytes:
    """Data without its checksum, if that is right."""
    if len(data) < _CHECKSUM:
        raise CorruptChunk(f"{len(data)} bytes are too few for a checksum")
    body, stored = data[:-_CHECKSUM], int.from_bytes(data[-_CHECKSUM:], "little")
    if google_crc32c.value(body) != stored:
        raise CorruptChunk("the checksum (CRC-32C) does not match")
    return body


@dataclass(frozen=True)
class ZstdCodec:
    """Lossless."""

    level: int = 3
    name = "zstd"

    def encode(self, chunk: Chunk) -> bytes:
        """The bytes of one chunk (c, y, x)."""
        raw: Any = np.ascontiguousarray(chunk).data
        return with_checksum(bytes(imagecodecs.zstd_encode(raw, level=self.level)))

    def decode(self, data: bytes, out: Chunk) -> Chunk:
        """Fills `out` with the chunk of these bytes."""
        body = without_checksum(data)
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
