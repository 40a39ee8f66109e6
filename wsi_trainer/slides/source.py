"""`SlideSource`: a slide as the engine reads it, tile by tile, from a store or straight from its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_plugin import Box

from .block_source import CACHE, BlockSource, Cell
from .blocks import Block
from .order import room
from .store.layout import CHANNELS, FILL
from .store.level import paste
from .tissue import TissueMask


class SlideSource(BlockSource):
    """A `TileSource` of one slide: shape (1, 3, height, width), uint8.

    Pixels lie in memory as the decoder makes them (`memory_format`): channels last, but for stores of planes.

    Blocks are read by a few threads. One that lies wholly in a box is decoded straight to its place there; one at
    the border is kept in a bounded cache, since the next box reaches into it with its halo. An image that fits into
    the cache is kept from the second reading on.
    Boxes over absent chunks of a store, or outside a tissue mask, are known to be constant without reading.
    A source may be pickled, sent to a spawned process, or used in a forked one; each opens its own files.

    Args:
        path: A store that `wsi-train preprocess` wrote, another OME-Zarr store, or a slide of any scanner.
        level: The level to read; 0 is the finest.
        mpp: Micrometres per pixel, instead of a level. A slide's finer level is filtered down; a store must
            have a level of it.
        source_mpp: The resolution of a slide whose file does not say it.
        mask: Tissue; the rest becomes the fill value. Only for slides: a store was masked by preprocess.
        cache: Most bytes of pixels to keep: half for blocks, half for boxes that are read ahead. A box of more than
            that half is not read ahead.
        threads: How many blocks are read at the same time.

    Example:
        >>> source = SlideSource("slide.zarr")                                            # doctest: +SKIP
        >>> source.read(Box((0, 0), (1024, 1024))).shape                                  # doctest: +SKIP
        torch.Size([1, 3, 1024, 1024])
    """

    def __init__(
        self, path: Path | str, *, level: int = 0, mpp: float | None = None, source_mpp: float | None = None,
        mask: TissueMask | None = None, cache: int = CACHE, threads: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(
            path, level=level, mpp=mpp, source_mpp=source_mpp, mask=mask, cache=cache, threads=threads
        )  # fmt: skip

    def _open(self) -> None:
        super()._open()
        self.shape = (1, CHANNELS, *self._blocks.shape)
        self._small = CHANNELS * self._blocks.shape[0] * self._blocks.shape[1] <= self._arguments["cache"] // 2
        self._seen: set[Cell] = set()  # blocks of a small image that were read once

    def _corner(self, box: Box) -> tuple[int, int, int, int]:
        (y, x), (bottom, right) = box.lo, box.hi
        if not (0 <= y <= bottom <= self.shape[2] and 0 <= x <= right <= self.shape[3]):
            raise IndexError(f"{box} leaves {self.path}, which has {self.shape[2]} x {self.shape[3]} pixels")
        return y, x, bottom - y, right - x

    def _cells(self, y: int, x: int, height: int, width: int) -> list[Cell]:
        size = self._blocks.size
        rows = range(y // size, (y + height - 1) // size + 1)
        columns = range(x // size, (x + width - 1) // size + 1)
        return [(row, column) for row in rows for column in columns]

    def read(self, box: Box) -> Tensor:
        """The pixels (1, 3, height, width) of a box inside the slide."""
        return torch.from_numpy(self._read(box))

    def _begun(self, box: Box) -> tuple[Block, Sequence[Cell]]:
        y, x, height, width = self._corner(box)
        out = room(self._blocks.order, 1, CHANNELS, height, width)
        return out, self._cells(y, x, height, width) if out.size else []

    def _fill(self, out: Block, cells: Sequence[Cell], box: Box) -> None:
        (y, x), image = box.lo, out[0]
        for cell in cells:
            if self._is_kept(cell, y, x, *image.shape[1:]):
                paste(image, self._cache.get(cell), self._blocks.size, *cell, y, x)
            else:
                self._blocks.paste(*cell, image, y, x)

    def _is_kept(self, cell: Cell, y: int, x: int, height: int, width: int) -> bool:
        """Whether a block will be wanted again soon: it reaches out of the box, or is read a second time."""
        size = self._blocks.size
        top, left = cell[0] * size, cell[1] * size
        bottom, right = min(top + size, self.shape[2]), min(left + size, self.shape[3])
        if top < y or left < x or bottom > y + height or right > x + width or cell in self._cache:
            return True
        again = cell in self._seen
        if self._small:
            self._seen.add(cell)
        return again

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        self._here()
        y, x, height, width = self._corner(box)
        if height * width and self._blocks.is_fill(y, x, height, width):
            return torch.full((CHANNELS,), FILL, dtype=self.dtype)
        return None
