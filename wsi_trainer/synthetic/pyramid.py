"""Writing a slide as a tiled, pyramidal JPEG (Big)TIFF, block by block: memory does not grow with the slide.

A TIFF wants its levels one after the other, so the pixels of each next level wait in a temporary file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Render = Callable[[int, int, int, int], Pixels]

TILE = 256
FACTOR = 4
BLOCK = TILE * FACTOR  # a block of a level is one tile of the next
_CLASSIC_LIMIT = 2**32


def encode(pixels: Pixels, quality: int) -> bytes:
    """One JPEG tile (luminance at full, colour at half resolution); at a border continued to the full size."""
    missing = (TILE - pixels.shape[0], TILE - pixels.shape[1])
    if any(missing):
        pixels = np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
    data = imagecodecs.jpeg8_encode(
        np.ascontiguousarray(pixels), level=quality, colorspace="RGB", outcolorspace="YCBCR", subsampling="420"
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


def _tiles(
    read: Render, shape: tuple[int, int], above: Pixels | None, quality: int, pool: ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> Iterator[bytes]:  # fmt: skip
    """The tiles of a level in the order of the file; fills the level above."""

    def block(y: int, x: int) -> list[list[bytes]]:
        pixels = read(y, x, min(BLOCK, shape[0] - y), min(BLOCK, shape[1] - x))
        height, width = pixels.shape[:2]
        constant = pixels.strides[:2] == (0, 0)  # one colour: encoded once
        if above is not None:
            part = above[y // FACTOR : (y + BLOCK) // FACTOR, x // FACTOR : (x + BLOCK) // FACTOR]
            part[:] = pixels[0, 0] if constant else reduce(pixels)
        if constant:
            return [[encode(pixels[:TILE, :TILE], quality)] * -(-width // TILE)] * -(-height // TILE)
        return [
            [encode(pixels[ty : ty + TILE, tx : tx + TILE], quality) for tx in range(0, width, TILE)]
            for ty in range(0, height, TILE)
        ]

    for y in range(0, shape[0], BLOCK):
        columns = range(0, shape[1], BLOCK)
        blocks = list(pool.map(block, [y] * len(columns), columns))
        progress(min(BLOCK, shape[0] - y) * shape[1])
        for row in range(len(blocks[0])):
            for tiles in blocks:
                yield from tiles[row]


def _boxes_of(pixels: Pixels) -> Render:
    return lambda y, x, height, width: pixels[y : y + height, x : x + width]


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
        path: the file; one that ends in ``.svs`` says of itself what a scanner of Aperio says.
        shape: height and width at full resolution.
        mpp: micrometres per pixel, written as the TIFF's resolution, where OpenSlide finds it.
        progress: called with the number of full-resolution pixels that were added.
    """
    shapes = level_shapes(*shape)
    sides = f"{shape[1]}x{shape[0]}"
    svs = path.suffix == ".svs"
    aperio = f"Aperio Image Library v12.0.0\n{sides} [0,0 {sides}] (256x256) JPEG/RGB Q={quality}|MPP = {mpp:.4f}"
    with TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor(threads) as pool:
        partial = Path(scratch) / path.name
        with tifffile.TiffWriter(partial, bigtiff=shape[0] * shape[1] * 1.5 > _CLASSIC_LIMIT) as tif:
            read = render
            for level, size in enumerate(shapes):
                above: Pixels | None = None
                if level + 1 < len(shapes):
                    waiting = Path(scratch) / f"level{level + 1}"
                    above = np.memmap(waiting, np.uint8, "w+", shape=(*shapes[level + 1], 3))
                per_cm = 1e4 / (mpp * FACTOR**level)
                tif.write(
                    _tiles(read, size, above, quality, pool, progress if level == 0 else lambda pixels: None),
                    shape=(*size, 3), dtype=np.uint8, tile=(TILE, TILE), photometric="ycbcr",
                    compression="jpeg", subsampling=(2, 2), subfiletype=int(level > 0 and not svs), metadata=None,
                    resolution=(per_cm, per_cm), resolutionunit="CENTIMETER", software="wsi-trainer",
                    description=aperio if svs else None,
                )  # fmt: skip
                if above is not None:
                    read = _boxes_of(above)
                    if svs and level == 0:  # whose second picture is a thumbnail
                        tif.write(np.asarray(above), photometric="rgb", metadata=None, description=aperio)
        os.replace(partial, path)
