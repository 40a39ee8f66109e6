"""Chunks as bytes: zstd, which is lossless and which every zarr v3 reader knows, and a checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from ..scratch import scratch

Chunk = NDArray[np.uint8]
Bytes = NDArray[np.uint8]
"""Encoded bytes, in one dimension."""

_CHECKSUM = 4  # bytes


class CorruptChunk(Exception):
    """The bytes of a chunk are not those that were written."""


def with_checksum(data: bytes) -> bytes:
    """Data followed by its CRC-32C, as zarr's codec `crc32c` writes it."""
    return data + int(google_crc32c.value(data)).to_bytes(_CHECKSUM, "little")


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
        # zstd needs room for what it cannot make smaller; in kept memory, and copied once, to its true size.
        room: Any = scratch("encoding", raw.nbytes + raw.nbytes // 128 + 1024)
        size = len(imagecodecs.zstd_encode(raw, level=self.level, out=room[:-_CHECKSUM]))
        seal = int(google_crc32c.value(room[:size]))
        room[size : size + _CHECKSUM] = np.frombuffer(seal.to_bytes(_CHECKSUM, "little"), np.uint8)
        return bytes(room[: size + _CHECKSUM].tobytes())

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
