"""How the bytes of a chunk are made and read, always with a checksum.

zstd is lossless, and every zarr v3 reader knows it. JPEG is a fifth of the size and is read by this package
only: zarr's codec `jpeg` is a draft that no released reader has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from ..order import Order
from ..readers.protocol import to_planes
from ..scratch import beside_alignment, scratch

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


class Codec(Protocol):
    """One way to store a chunk (c, y, x) of bytes."""

    @property
    def lossless(self) -> bool: ...

    @property
    def order(self) -> Order: ...

    def encode(self, chunk: Chunk) -> bytes: ...

    def decode(self, data: Bytes, out: Chunk) -> Chunk: ...

    def metadata(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class ZstdCodec:
    """Lossless, at one of zstd's levels."""

    level: int = 3

    @property
    def lossless(self) -> bool:
        return True

    @property
    def order(self) -> Order:
        """How the pixels lie that decoding makes."""
        return "planes"

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


@dataclass(frozen=True)
class JpegCodec:
    """Lossy, with colour at full resolution."""

    quality: int = 90

    @property
    def lossless(self) -> bool:
        return False

    @property
    def order(self) -> Order:
        """How the pixels lie that decoding makes."""
        return "pixels"

    def encode(self, chunk: Chunk) -> bytes:
        """The bytes of one chunk of three channels."""
        pixels = np.ascontiguousarray(np.moveaxis(chunk, 0, 2))
        data = imagecodecs.jpeg8_encode(pixels, level=self.quality, colorspace="RGB", subsampling="444")
        return with_checksum(bytes(data))

    def decode(self, data: Bytes, out: Chunk) -> Chunk:
        """Fills `out` with the chunk of these bytes."""
        body: Any = without_checksum(data)
        place = out.transpose(1, 2, 0)
        # The decoder leaves no gaps between pixels and rows, so elsewhere it is a copy.
        pixels = place if place.flags.c_contiguous else beside_alignment("jpeg", *place.shape)
        try:
            imagecodecs.jpeg8_decode(body, out=pixels)
        except (imagecodecs.Jpeg8Error, ValueError) as error:  # ValueError: of another size
            raise CorruptChunk(str(error)) from error
        return out if pixels is place else to_planes(pixels, out)

    def metadata(self) -> list[dict[str, Any]]:
        """The codecs inside a shard, as they stand in zarr.json."""
        return [
            {"name": "transpose", "configuration": {"order": [1, 2, 0]}},
            {"name": "jpeg", "configuration": {"quality": self.quality}},
            {"name": "crc32c"},
        ]


def codec_of(metadata: list[dict[str, Any]]) -> Codec:
    """The codec that wrote this metadata.

    Raises:
        ValueError: It is none of this package's.
    """
    by_name = {entry["name"]: entry.get("configuration", {}) for entry in metadata}
    codec: Codec = JpegCodec(by_name["jpeg"]["quality"]) if "jpeg" in by_name else ZstdCodec(by_name["zstd"]["level"])
    if codec.metadata() != metadata:
        raise ValueError(f"unknown codecs {[entry['name'] for entry in metadata]}")
    return codec
