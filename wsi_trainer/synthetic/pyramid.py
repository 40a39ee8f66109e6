"""Writing a slide as a tiled, pyramidal JPEG (Big)TIFF in one pass, a band of rows at a time.

Level 0 goes straight to the file. The coarser levels are computed on the way from the pixels of the finer
one and wait in temporary files as encoded tiles, because a TIFF wants its levels one after the other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Render = Callable[[int, int, int, int], Pixels]

TILE = 256
FACTOR = 4
BLOCK = TILE * FACTOR  # a block of level 0 is one tile of level 1
_CLASSIC_LIMIT = 2**32


def encode(tile: Pixels, quality: int) -> bytes:
    """One JPEG tile (luminance at full, colour at half resolution)."""
    data = imagecodecs.jpeg8_encode(
        np.ascontiguousarray(tile), level=quality, colorspace="RGB", outcolorspace="YCBCR", subsampling="420"
    )
    return bytes(data)


def reduce(pixels: Pixels) -> Pixels:
    """Means over FACTOR x FACTOR pixels; a border that is not a multiple is continued by its last pixel."""
    height, width = pixels.shape[:2]
    pad = ((0, -height % FACTOR), (0, -width % FACTOR), (0, 0))
    if any(after for _, after in pad):
        pixels = np.pad(pixels, pad, mode="edge")
    rows = pixels.reshape(pixels.shape[0] // FACTOR, FACTOR, pixels.shape[1], 3).sum(1, dtype=np.uint16)
    total = rows.reshape(rows.shape[0], -1, FACTOR, 3).sum(2, dtype=np.uint16)
    return ((total + FACTOR * FACTOR // 2) // (FACTOR * FACTOR)).astype(np.uint8)


def level_shapes(height: int, width: int) -> list[tuple[int, int]]:
    """Shapes of all levels: coarser ones until one fits a tile."""
    shapes = [(height, width)]
    while max(shapes[-1]) > TILE:
        shapes.append((-(-shapes[-1][0] // FACTOR), -(-shapes[-1][1] // FACTOR)))
    return shapes


class _Spool:
    """Encoded tiles that wait in a temporary file."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed when it was read
        self._lengths: list[int] = []

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._lengths.append(len(data))

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        for length in self._lengths:
            yield self._file.read(length)
        self._file.close()


class _Level:
    """A level above 0: collects bands of rows, spools full rows of tiles, hands reduced ones on."""

    def __init__(self, shapes: list[tuple[int, int]], folder: Path, quality: int) -> None:
        self._shape, self._quality = shapes[0], quality
        self._band = np.empty((TILE, shapes[0][1], 3), np.uint8)
        self._filled = self._seen = 0
        self.tiles = _Spool(folder)
        self.next = _Level(shapes[1:], folder, quality) if len(shapes) > 1 else None

    def push(self, rows: Pixels) -> None:
        """Takes rows; their number divides TILE, except for the last ones."""
        self._band[self._filled : self._filled + len(rows)] = rows
        self._filled += len(rows)
        self._seen += len(rows)
        if self._filled == TILE or self._seen == self._shape[0]:
            band = self._band[: self._filled]
            for x in range(0, self._shape[1], TILE):
                self.tiles.add(encode(_full_tile(band[:, x : x + TILE]), self._quality))
            if self.next is not None:
                self.next.push(reduce(band))
            self._filled = 0


def _full_tile(pixels: Pixels) -> Pixels:
    """A tile at the border, continued to the full size."""
    missing = (TILE - pixels.shape[0], TILE - pixels.shape[1])
    return np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge") if any(missing) else pixels


def _block(render: Render, y: int, x: int, shape: tuple[int, int], quality: int) -> tuple[list[list[bytes]], Pixels]:
    """The encoded tiles of one block, row by row, and the block reduced."""
    pixels = render(y, x, min(BLOCK, shape[0] - y), min(BLOCK, shape[1] - x))
    height, width = pixels.shape[:2]
    if pixels.strides[:2] == (0, 0):  # one colour: encoded once
        data = encode(np.broadcast_to(pixels[0, 0], (TILE, TILE, 3)), quality)
        rows = [[data] * -(-width // TILE)] * -(-height // TILE)
        return rows, np.broadcast_to(pixels[0, 0], (-(-height // FACTOR), -(-width // FACTOR), 3))
    rows = [
        [encode(_full_tile(pixels[ty : ty + TILE, tx : tx + TILE]), quality) for tx in range(0, width, TILE)]
        for ty in range(0, height, TILE)
    ]
    return rows, reduce(pixels)


def _level0(
    render: Render,
    shape: tuple[int, int],
    above: _Level | None,
    quality: int,
    threads: int,
    progress: Callable[[int], None],
) -> Iterator[bytes]:
    """The tiles of level 0 in the order of the file; feeds the level above."""
    with ThreadPoolExecutor(threads) as pool:
        for y in range(0, shape[0], BLOCK):
            columns = range(0, shape[1], BLOCK)
            blocks = list(pool.map(lambda x, y=y: _block(render, y, x, shape, quality), columns))  # type: ignore[misc]
            # Before the tiles are handed out: nobody asks again after the last of them.
            if above is not None:
                above.push(np.concatenate([small for _, small in blocks], 1))
            progress(min(BLOCK, shape[0] - y) * shape[1])
            for row in range(len(blocks[0][0])):
                for tiles, _ in blocks:
                    yield from tiles[row]


def write_pyramid(
    path: Path,
    render: Render,
    shape: tuple[int, int],
    *,
    mpp: float,
    quality: int = 88,
    threads: int = 1,
    progress: Callable[[int], None] = lambda pixels: None,
) -> None:
    """Writes the slide that ``render(y, x, height, width)`` computes. The file appears when it is complete.

    Args:
        shape: height and width at full resolution.
        mpp: micrometres per pixel, written as the TIFF's resolution, where OpenSlide finds it.
        progress: called with the number of full-resolution pixels that were added.
    """
    shapes = level_shapes(*shape)
    above = _Level(shapes[1:], path.parent, quality) if len(shapes) > 1 else None
    partial = path.with_name(path.name + ".part")
    try:
        with tifffile.TiffWriter(partial, bigtiff=shape[0] * shape[1] * 1.5 > _CLASSIC_LIMIT) as tif:
            tiles: Iterator[bytes] = _level0(render, shape, above, quality, threads, progress)
            level, scale = above, 1
            for height, width in shapes:
                per_cm = 1e4 / (mpp * scale)
                tif.write(
                    tiles, shape=(height, width, 3), dtype=np.uint8, tile=(TILE, TILE), photometric="ycbcr",
                    compression="jpeg", subsampling=(2, 2), subfiletype=int(scale > 1), metadata=None,
                    resolution=(per_cm, per_cm), resolutionunit="CENTIMETER", software="wsi-trainer",
                )  # fmt: skip
                if level is not None:
                    tiles, level, scale = iter(level.tiles), level.next, scale * FACTOR
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
