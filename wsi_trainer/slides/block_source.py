"""`BlockSource`: what all sources of a slide share, which read it block by block, ahead, in any process."""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lightning_plugin import Box
from wsi_trainer.places import Place

from .blocks import Block, Blocks, SlideBlocks, StoredBlocks, is_own_store, stored_mpp
from .cache import LoadingCache
from .errors import AbsentResolution, SlideError
from .formats import FORMATS
from .resolution import TOLERANCE
from .store.layout import CHANNELS
from .tissue import TissueMask

CACHE = 256 << 20

Cell = tuple[int, int]
"""A block by its row and column."""


class BlockSource(ABC):
    """A source of one slide whose blocks are read by a few threads.

    Half of the cache is for blocks that will be wanted again, half for boxes that are read ahead.
    A source may be pickled, sent to a spawned process, or used in a forked one; each opens its own files.
    """

    dtype = torch.uint8
    shape: tuple[int, ...]

    def __init__(self, path: Path | str, **arguments: Any) -> None:
        self.path = Path(path)
        self._arguments = arguments
        self._open()

    def _open(self) -> None:
        settings = self._arguments
        self._blocks = blocks = _open_blocks(
            self.path, settings["level"], settings["mpp"], settings["source_mpp"], settings.get("mask")
        )
        self.mpp = self._blocks.mpp
        self._cache: LoadingCache[Cell, Block | None] = LoadingCache(
            lambda cell: blocks.load(*cell),  # without a circle, which Python would close late
            lambda block: 64 if block is None else block.nbytes,
            settings["cache"] // 2,
        )
        self._ahead: OrderedDict[Box, _Pending] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    @abstractmethod
    def _begun(self, box: Box) -> tuple[Block, Sequence[Cell]]:
        """The array for the pixels of a box, and the blocks that are in it; an error where the box is not inside."""

    @abstractmethod
    def _fill(self, out: Block, cells: Sequence[Cell], box: Box) -> None:
        """Puts blocks to their places in the box."""

    @property
    def place(self) -> Place:
        """Where the image lies in the slide: turns its positions into those of the original file, and back."""
        return self._blocks.place

    @property
    def memory_format(self) -> torch.memory_format:
        """How the pixels of all boxes lie in memory; see [order] in `order`."""
        return FORMATS[self._blocks.order]

    @property
    def block(self) -> int:
        """Pixels along a side of the blocks in which the slide is read."""
        return self._blocks.size

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
        return _restore, (type(self), self.path, self._arguments)

    def _read(self, box: Box) -> Block:
        """The pixels of a box, whether or not it was read ahead."""
        self._here()
        with self._lock:
            pending = self._ahead.pop(box, None)
        if pending is None:
            pending = self._begin(box, ahead=False)
        return pending.result()

    def _begin(self, box: Box, *, ahead: bool) -> _Pending:
        """Starts to read a box in the threads; what is wanted now is read by this thread as well."""
        out, cells = self._begun(box)
        pool = self._pool() if len(cells) > 1 or ahead else None
        if pool is None:
            self._fill(out, cells, box)
            return _Pending(out, [])
        count = min(self._arguments["threads"], len(cells))
        parts = [cells[start::count] for start in range(count)]
        mine = [] if ahead else parts.pop()
        pending = _Pending(out, [pool.submit(self._fill, out, part, box) for part in parts])
        self._fill(out, mine, box)
        return pending

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

    def forget(self) -> None:
        """Lets go of all pixels, also of those that were read ahead. The source may still be read."""
        self.close()
        self._cache.clear()


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


def _restore(kind: type[BlockSource], path: Path, arguments: dict[str, Any]) -> BlockSource:
    return kind(path, **arguments)


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
    raise AbsentResolution(path, f"no level has {mpp:g} µm a pixel; there are {', '.join(f'{m:g}' for m in found)}")
