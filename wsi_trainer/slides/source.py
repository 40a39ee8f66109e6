"""`SlideSource`: a slide as the engine reads it, tile by tile, from a store or straight from its file."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.places import Place

from .blocks import Block, Blocks, SlideBlocks, StoredBlocks, is_own_store, stored_mpp
from .cache import LoadingCache
from .errors import SlideError
from .resolution import TOLERANCE
from .store.layout import CHANNELS, FILL
from .store.level import paste
from .tissue import TissueMask

CACHE = 256 << 20

Cell = tuple[int, int]
"""A block by its row and column."""


class SlideSource:
    """A `TileSource` of one slide: shape (1, 3, height, width), uint8.

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

    dtype = torch.uint8

    def __init__(
        self, path: Path | str, *, level: int = 0, mpp: float | None = None, source_mpp: float | None = None,
        mask: TissueMask | None = None, cache: int = CACHE, threads: int = 2,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self._arguments: dict[str, Any] = {
            "level": level, "mpp": mpp, "source_mpp": source_mpp, "mask": mask, "cache": cache,
            "threads": threads,
        }  # fmt: skip
        self._open()

    def _open(self) -> None:
        settings = self._arguments
        self._blocks = _open_blocks(self.path, **{k: settings[k] for k in ("level", "mpp", "source_mpp", "mask")})
        self.shape = (1, CHANNELS, *self._blocks.shape)
        self.mpp = self._blocks.mpp
        self._cache: LoadingCache[Cell, Block | None] = LoadingCache(
            lambda cell: self._blocks.load(*cell),
            lambda block: 64 if block is None else block.nbytes,
            settings["cache"] // 2,
        )
        self._small = CHANNELS * self._blocks.shape[0] * self._blocks.shape[1] <= settings["cache"] // 2
        self._seen: set[Cell] = set()  # blocks of a small image that were read once
        self._ahead: OrderedDict[Box, _Pending] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def place(self) -> Place:
        """Where the image lies in the slide: turns its positions into those of the original file, and back."""
        return self._blocks.place

    def _here(self) -> None:
        """Opens everything anew in a forked process, where threads and locks of the parent are dead."""
        if self._process != os.getpid():
            self._open()

    def _pool(self) -> ThreadPoolExecutor | None:
        if self._arguments["threads"] < 2:
            return None
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._arguments["threads"], thread_name_prefix="slide")
            return self._threads

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.path, self._arguments)

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
        self._here()
        with self._lock:
            pending = self._ahead.pop(box, None)
        if pending is None:
            pending = self._begin(box, ahead=False)
        return torch.from_numpy(pending.result())[None]

    def _begin(self, box: Box, *, ahead: bool) -> _Pending:
        """Starts to read a box in the threads; what is wanted now is read by this thread as well."""
        y, x, height, width = self._corner(box)
        out = np.empty((CHANNELS, height, width), np.uint8)
        cells = self._cells(y, x, height, width) if out.size else []
        pool = self._pool() if len(cells) > 1 or ahead else None
        if pool is None:
            self._fill(out, cells, y, x)
            return _Pending(out, [])
        count = min(self._arguments["threads"], len(cells))
        parts = [cells[start::count] for start in range(count)]
        mine = [] if ahead else parts.pop()
        pending = _Pending(out, [pool.submit(self._fill, out, part, y, x) for part in parts])
        self._fill(out, mine, y, x)
        return pending

    def _fill(self, out: Block, cells: list[Cell], y: int, x: int) -> None:
        """Puts blocks to their places in the box whose corner is (y, x)."""
        for cell in cells:
            if self._is_kept(cell, y, x, out.shape[1], out.shape[2]):
                paste(out, self._cache.get(cell), self._blocks.size, *cell, y, x)
            else:
                self._blocks.paste(*cell, out, y, x)

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

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Starts to read boxes that will be asked for soon, as far as they fit into half of the cache.

        The oldest that nobody asked for make room.
        """
        self._here()
        if self._pool() is None:
            return
        room = self._arguments["cache"] // 2
        for box in boxes:
            room -= CHANNELS * math.prod(box.extent)
            if room < 0:
                return
            if box in self._ahead:
                continue
            pending = self._begin(box, ahead=True)
            with self._lock:
                self._ahead[box] = pending
                while sum(kept.size for kept in self._ahead.values()) > self._arguments["cache"] // 2:
                    self._ahead.popitem(last=False)[1].cancel()

    def close(self) -> None:
        """Ends the threads. The source may still be read; it starts them again."""
        with self._lock:
            self._ahead.clear()
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
                self._threads = None


class _Pending:
    """A box that is being read."""

    def __init__(self, out: Block, parts: list[Future[None]]) -> None:
        self._out, self._parts = out, parts
        self.size = out.nbytes

    def result(self) -> Block:
        """The pixels, as soon as all of them are there; raises what reading raised."""
        for part in self._parts:
            part.result()
        return self._out

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


def _restore(path: Path, arguments: dict[str, Any]) -> SlideSource:
    return SlideSource(path, **arguments)


def _open_blocks(
    path: Path, level: int, mpp: float | None, source_mpp: float | None, mask: TissueMask | None
) -> Blocks:
    if not path.exists():
        raise SlideError(path, "does not exist")
    if not is_own_store(path):
        return SlideBlocks(path, level, mpp, source_mpp, mask)
    if mask is not None:
        raise ValueError(f"{path} is a store: its background was decided by preprocess; give no mask")
    return StoredBlocks(path, level if mpp is None else _level_of(path, mpp))


def _level_of(path: Path, mpp: float) -> int:
    """The level of a store with this resolution."""
    found: list[float] = []
    while (path / str(len(found)) / "zarr.json").exists():
        found.append(sum(stored_mpp(path, len(found))) / 2)
        if abs(mpp / found[-1] - 1) <= TOLERANCE:
            return len(found) - 1
    raise SlideError(path, f"no level has {mpp:g} µm a pixel; there are {', '.join(f'{m:g}' for m in found)}")
