"""`PatchSource`: patches of a slide as one bag that is read by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box

from .block_source import CACHE, BlockSource, Cell
from .blocks import Block
from .order import room
from .store.layout import CHANNELS, FILL

Positions = NDArray[np.int32]
"""The upper left corners of patches, (K, 2): row and column of a pixel of the image."""


class PatchSource(BlockSource):
    """A `TileSource` of K square patches of one slide: shape (K, 3, size, size), uint8.

    A box begins with the patches that are meant: `[3:5 x 0:64 x 0:64]` is a corner of patches 3 and 4. A block is
    decoded once for all patches of a box, and kept for those that come next: in the order of `along_blocks` each block
    is decoded once, as long as two rows of blocks fit into half of the cache. What of a patch lies outside of the slide
    is glass.

    Args:
        path: As of a `SlideSource`.
        positions: Where the patches lie in the image of this level or resolution.
        size: Pixels along a side of a patch.
        level: The level to read; 0 is the finest.
        mpp: Micrometres per pixel, instead of a level.
        source_mpp: The resolution of a slide whose file does not say it.
        cache: Most bytes of pixels to keep: half for blocks, half for boxes that are read ahead.
        threads: How many blocks are read at the same time.

    Example:
        >>> bag = PatchSource("slide.zarr", np.array([[0, 0], [0, 224]]), 224)             # doctest: +SKIP
        >>> bag.read(Box((1, 0, 0), (2, 224, 224))).shape                                 # doctest: +SKIP
        torch.Size([1, 3, 224, 224])
    """

    instances = 1

    def __init__(
        self, path: Path | str, positions: Positions, size: int, *, level: int = 0, mpp: float | None = None,
        source_mpp: float | None = None, cache: int = CACHE, threads: int = 2,
    ) -> None:  # fmt: skip
        self.positions = np.ascontiguousarray(positions, np.int32)
        self.size = size
        self.shape = (len(positions), CHANNELS, size, size)
        super().__init__(
            path, positions=self.positions, size=size, level=level, mpp=mpp, source_mpp=source_mpp, cache=cache,
            threads=threads,
        )  # fmt: skip

    def at(self, positions: Positions) -> PatchSource:
        """The bag of other patches of the same slide."""
        return PatchSource(self.path, **{**self._arguments, "positions": positions})

    def read(self, box: Box) -> Tensor:
        """The pixels (patches, 3, height, width) of a box of patches."""
        return torch.from_numpy(self._read(box))

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        self._here()
        corners, height, width = self._corners(box)
        rows, columns = self._blocks.shape
        for y, x in corners.tolist():
            top, left, bottom, right = max(y, 0), max(x, 0), min(y + height, rows), min(x + width, columns)
            if top < bottom and left < right and not self._blocks.is_fill(top, left, bottom - top, right - left):
                return None
        return torch.full((CHANNELS,), FILL, dtype=self.dtype) if corners.size and height * width else None

    def _corners(self, box: Box) -> tuple[Positions, int, int]:
        """Where the parts of patches that a box means lie in the image, and their height and width."""
        if box.ndim != 3 or any(not 0 <= lo <= hi <= end for (lo, hi), end in zip(box.intervals(), self._ends())):
            raise IndexError(f"{box} leaves the {self.shape[0]} patches of {self.size} x {self.size} of {self.path}")
        (first, y, x), (last, *_) = box.lo, box.hi
        return self.positions[first:last] + np.array([y, x], np.int32), box.extent[1], box.extent[2]

    def _ends(self) -> tuple[int, int, int]:
        return self.shape[0], self.size, self.size

    def _begun(self, box: Box) -> tuple[Block, Sequence[Cell]]:
        corners, height, width = self._corners(box)
        out = room(self._blocks.order, len(corners), CHANNELS, height, width)
        if not out.size:
            return out, []
        ends = np.array(self._blocks.shape) - (height, width)
        if (corners < 0).any() or (corners > ends).any():
            out[...] = FILL
        return out, sorted(_touched(corners, height, width, self._blocks.size, self._blocks.shape))

    def _fill(self, out: Block, cells: Sequence[Cell], box: Box) -> None:
        corners, height, width = self._corners(box)
        touched = _touched(corners, height, width, self._blocks.size, self._blocks.shape)
        for cell in cells:
            block = self._cache.get(cell)
            for number in touched[cell]:
                self._paste(out[number], block, cell, *corners[number].tolist())

    def _paste(self, patch: Block, block: Block | None, cell: Cell, y: int, x: int) -> None:
        """Copies what a block and a patch with its corner at (y, x) have in common, within the slide."""
        size, (rows, columns) = self._blocks.size, self._blocks.shape
        top, left = max(cell[0] * size, y), max(cell[1] * size, x)
        bottom = min((cell[0] + 1) * size, y + patch.shape[1], rows)
        right = min((cell[1] + 1) * size, x + patch.shape[2], columns)
        target = patch[:, top - y : bottom - y, left - x : right - x]
        if block is None:
            target[...] = FILL
        else:
            corner = cell[0] * size, cell[1] * size
            target[...] = block[:, top - corner[0] : bottom - corner[0], left - corner[1] : right - corner[1]]


def _touched(corners: Positions, height: int, width: int, size: int, shape: tuple[int, int]) -> dict[Cell, list[int]]:
    """The blocks inside an image that rectangles touch, each with the numbers of these."""
    found: dict[Cell, list[int]] = {}
    for number, (y, x) in enumerate(corners.tolist()):
        for row in _span(y, height, size, shape[0]):
            for column in _span(x, width, size, shape[1]):
                found.setdefault((row, column), []).append(number)
    return found


def _span(start: int, length: int, size: int, end: int) -> range:
    """The blocks along one direction that a part of it touches; none where it lies beyond the image."""
    first, last = max(start, 0), min(start + length, end)
    return range(first // size, (last - 1) // size + 1) if first < last else range(0)


def along_blocks(positions: Positions, size: int, block: int, shape: tuple[int, int]) -> Positions:
    """The positions in the order in which blocks are met once: row of blocks by row of blocks, along the shorter side.

    A patch comes with the last block that it touches, so that of all rows only two have to be kept.

    Args:
        positions: Corners of patches.
        size: Pixels along a side of a patch.
        block: Pixels along a side of a block.
        shape: Height and width of the image.
    """
    outer = 0 if shape[1] <= shape[0] else 1
    last = (positions + size - 1) // block
    keys = (positions[:, 1 - outer], positions[:, outer], last[:, 1 - outer], last[:, outer])
    return positions[np.lexsort(keys)]
