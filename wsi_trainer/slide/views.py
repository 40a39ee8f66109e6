"""`Image` and `Bag`: what the engine reads of a slide, tile by tile or patch by patch.

[ahead] What a step reads is a function of the slide, of how it is shown and of the box, and of nothing that changes
meanwhile: how slides are ordered and augmented is drawn before, and no generator is asked here. So pixels that were
read in another thread, earlier, are the pixels, and results are the same to the bit. What went wrong is raised where
the box is asked for, in the step of its slide.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.errors import SlideError
from wsi_trainer.slide.cache import LoadingCache
from wsi_trainer.slide.formats.base import CHANNELS, FILL, room
from wsi_trainer.slide.geometry import Pair, Resolution, SlideTransform
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.slide import ScaledImage, Slide
from wsi_trainer.slide.tissue import TissueMask

CACHE = 128 << 20
"""Most bytes of decoded blocks that a view keeps."""
AHEAD = 128 << 20
"""Most bytes that a view reads ahead."""

Block = NDArray[np.uint8]
"""Pixels as channel, y, x."""
Cell = tuple[int, int]
"""A block by its row and column."""
Positions = NDArray[np.int32]
"""The upper left corners of patches, (K, 2): row and column of a pixel of the image."""


class View(TileSource):
    """A source that reads ahead in a thread, and whose every failure names its slide.

    It may be pickled, sent to a spawned process or used in a forked one; what was read ahead stays behind. Subclasses
    write `load`.

    Attributes:
        name: Name of the slide in errors.
    """

    dtype = torch.uint8
    reads_ahead = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin_anew()

    def load(self, box: Box) -> Tensor:
        """The pixels of a box, read now."""
        raise NotImplementedError

    def _begin_anew(self) -> None:
        """Sets all that no other process can use."""
        self._waiting: OrderedDict[Box, Future[Tensor]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()

    def _here(self) -> None:
        """Begins anew in a forked process, where threads and locks of the parent are dead."""
        if self._process != os.getpid():
            self._begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        local = ("_waiting", "_thread", "_lock", "_process")
        return {key: value for key, value in self.__dict__.items() if key not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, which were read ahead, are on their way, or are read now."""
        self._here()
        with self._lock:
            found = self._waiting.pop(box, None)
        return self._named(box) if found is None else found.result()

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Starts to read boxes that will be asked for soon; the oldest that nobody asked for make room."""
        if not self.reads_ahead:
            return
        self._here()
        with self._lock:
            for box in boxes:
                if box not in self._waiting:
                    self._submit(box)

    def close(self) -> None:
        """Lets go of pixels, threads and the file; one that is read again opens it again."""
        self._here()
        with self._lock:
            running = list(self._waiting.values())
            for box in list(self._waiting):
                self._drop(box)
            thread, self._thread = self._thread, None
        wait([future for future in running if not future.cancelled()])
        if thread is not None:
            thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _named(self, box: Box) -> Tensor:
        with naming(self.name, box):
            return self.load(box)

    def _submit(self, box: Box) -> None:
        """Hands a box to the thread, unless it is larger than all that may be read ahead or there is no thread."""
        if self._size(box) > AHEAD:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        try:
            self._waiting[box] = self._thread.submit(self._named, box)
        except RuntimeError:  # the system gives no thread: the box is read when it is asked for
            return
        while sum(map(self._size, self._waiting)) > AHEAD:
            self._drop(next(iter(self._waiting)))

    def _drop(self, box: Box) -> None:
        gone = self._waiting.pop(box, None)
        if gone is not None:
            gone.cancel()

    def _size(self, box: Box) -> int:
        """Bytes of the pixels of a box."""
        lead = self.instances or 0
        images, channels = (1, self.shape[lead]) if lead else self.shape[:2]
        return images * channels * box.positions * self.dtype.itemsize


@contextmanager
def naming(name: str, box: Box) -> Iterator[None]:
    """Names the slide in what is raised inside: readers and decoders raise errors of many kinds, and none says which of
    hundreds of slides it was."""
    try:
        yield
    except SlideError:
        raise
    except Exception as error:
        raise SlideError(name, f"cannot be read at {box}: {str(error) or type(error).__name__}") from error


class BlockView(View):
    """A view of a slide that reads it block by block, in a few threads.

    Args:
        slide: The slide, which is closed with the view.
        mpp: Micrometres per pixel: the slide's finer level is filtered down to it. By default `factor` counts.
        factor: Pixels of the slide's level 0 along one pixel, or y and x.
        threads: Number of blocks that are read at the same time.
        cache: Most bytes of blocks to keep.

    Attributes:
        slide: The slide.
        size: Height and width of the image.
        block: Pixels along a side of a block.
    """

    def __init__(
        self, slide: Slide, mpp: float | None = None, *, factor: float | Pair = 1.0, threads: int = 2,
        cache: int = CACHE,
    ) -> None:  # fmt: skip
        self.slide, self._threads, self._limit = slide, threads, cache
        self._factor = factor if mpp is None else slide.factors(mpp)
        super().__init__(slide.name)
        self.size, self.block = self.image.shape, slide.block
        self.shape = (1, CHANNELS, *self.size)
        self.memory_format = torch.contiguous_format if self._planar else torch.channels_last

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.image = ScaledImage(self.slide, self._factor)
        self._planar = self.image.is_exact and self.slide.planar
        image, block, planar = self.image, self.slide.block, self._planar  # no circle, which Python would close late
        self._blocks: LoadingCache[Cell, Block | None] = LoadingCache(
            lambda cell: _block(image, block, planar, cell),
            lambda block: 64 if block is None else block.nbytes,
            self._limit,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("image", "_blocks")}

    @property
    def resolution(self) -> Resolution | None:
        """The size of a pixel, where it is known."""
        own = self.slide.resolution
        return None if own is None else own.coarser(*self.image.scale)

    @property
    def place(self) -> SlideTransform:
        """The place of the image in the slide that it was made from."""
        return self.slide.transform.scaled(*self.image.scale)

    def tissue(self) -> TissueMask:
        """The tissue, in pixels of the image."""
        return self.slide.tissue(self.image)

    def close(self) -> None:
        super().close()
        self._blocks.clear()
        self.slide.close()

    def _in_threads(self, fill: Callable[[Cell], None], cells: Sequence[Cell]) -> None:
        """Fills in all cells; this thread does its share."""
        count = min(self._threads, len(cells))
        parts = [cells[start::count] for start in range(count)]
        mine = parts.pop() if parts else []
        futures = [_pool(os.getpid(), self._threads).submit(_each, fill, part) for part in parts]
        try:
            _each(fill, mine)
        finally:
            wait(futures)  # they write into what is given away
        for future in futures:
            future.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of this process that read blocks: tasks that wait for no others."""
    return ThreadPoolExecutor(threads, thread_name_prefix="slide")


def _each(fill: Callable[[Cell], None], cells: Sequence[Cell]) -> None:
    for cell in cells:
        fill(cell)


def _block(image: ScaledImage, size: int, planar: bool, cell: Cell) -> Block | None:
    """The pixels of a block, or None where it is known to be empty."""
    y, x = cell[0] * size, cell[1] * size
    height, width = min(size, image.shape[0] - y), min(size, image.shape[1] - x)
    if image.empty(y, x, height, width):
        return None
    out = room(planar, CHANNELS, height, width)
    image.read_into(y, x, out)
    return out


class Image(BlockView):
    """A slide as one image: shape (1, 3, height, width), uint8.

    Pixels lie in memory as the decoder makes them (`memory_format`): channels last, but for stores.

    A block that lies wholly in a box is decoded straight to its place there; one at the border is kept in a bounded
    cache, since the next box reaches into it with its halo. An image that fits into the cache is kept from the second
    reading on. Boxes that the slide knows to be empty are known to be constant.

    Args:
        slide, mpp, factor, threads, cache: As of a `BlockView`.

    Example:
        >>> image = Image(Slide.open("slide.zarr"), mpp=0.5)                              # doctest: +SKIP
        >>> image.read(Box((0, 0), (1024, 1024))).shape                                   # doctest: +SKIP
        torch.Size([1, 3, 1024, 1024])
    """

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._seen: set[Cell] = set()  # blocks of a small image that were read once

    def load(self, box: Box) -> Tensor:
        """The pixels (1, 3, height, width) of a box inside the image."""
        y, x, height, width = self._corner(box)
        out = room(self._planar, 1, CHANNELS, height, width)
        if out.size:
            cells = cells_of(y, x, height, width, self.block)
            self._in_threads(lambda cell: self._fill(out[0], cell, y, x), cells)
        return torch.from_numpy(out)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        self._here()
        y, x, height, width = self._corner(box)
        if height * width and self.image.empty(y, x, height, width):
            return torch.full((CHANNELS,), FILL, dtype=self.dtype)
        return None

    def _corner(self, box: Box) -> tuple[int, int, int, int]:
        (y, x), (bottom, right) = box.lo, box.hi
        if not (0 <= y <= bottom <= self.size[0] and 0 <= x <= right <= self.size[1]):
            raise IndexError(f"{box} leaves {self.name}, which has {self.size[0]} x {self.size[1]} pixels")
        return y, x, bottom - y, right - x

    def _fill(self, out: Block, cell: Cell, y: int, x: int) -> None:
        """Puts a block to its place in the box whose corner is (y, x)."""
        top, left = cell[0] * self.block, cell[1] * self.block
        bottom, right = min(top + self.block, self.size[0]), min(left + self.block, self.size[1])
        inside = y <= top and x <= left and bottom <= y + out.shape[1] and right <= x + out.shape[2]
        if inside and not self._again(cell):
            part = out[:, top - y : bottom - y, left - x : right - x]
            if self.image.empty(top, left, *part.shape[1:]):
                part[...] = FILL
            else:
                self.image.read_into(top, left, part)
        else:
            paste(out, self._blocks.get(cell), self.block, cell, y, x)

    def _again(self, cell: Cell) -> bool:
        """True if a block is kept, or of a small image is read a second time."""
        if cell in self._blocks or cell in self._seen:
            return True
        if CHANNELS * self.size[0] * self.size[1] <= self._limit:
            self._seen.add(cell)
        return False


class Bag(BlockView):
    """K square patches of one slide: shape (K, 3, size, size), uint8.

    A box begins with the patches that are meant: `[3:5 x 0:64 x 0:64]` is a corner of patches 3 and 4. A block is
    decoded once for all patches of a box, and kept for those that come next: in the order of `along_blocks` each block
    is decoded once, as long as two rows of blocks fit into the cache. What of a patch lies outside of the slide is
    background.

    Args:
        slide: The slide, which is closed with the bag.
        positions: Corners of the patches in the image of this resolution.
        side: Pixels along a side of a patch.
        mpp, factor, threads, cache: As of a `BlockView`.

    Example:
        >>> bag = Bag(Slide.open("slide.zarr"), np.array([[0, 0], [0, 224]]), 224)         # doctest: +SKIP
        >>> bag.read(Box((1, 0, 0), (2, 224, 224))).shape                                 # doctest: +SKIP
        torch.Size([1, 3, 224, 224])
    """

    instances = 1

    def __init__(
        self, slide: Slide, positions: Positions, side: int, mpp: float | None = None, *, factor: float | Pair = 1.0,
        threads: int = 2, cache: int = CACHE,
    ) -> None:  # fmt: skip
        super().__init__(slide, mpp, factor=factor, threads=threads, cache=cache)
        self.positions, self.side = np.ascontiguousarray(positions, np.int32), side
        self.shape = (len(self.positions), CHANNELS, side, side)

    def at(self, positions: Positions) -> Bag:
        """The bag of other patches of the same slide."""
        return Bag(self.slide, positions, self.side, factor=self._factor, threads=self._threads, cache=self._limit)

    @property
    def places(self) -> Places:
        """Places of its patches in the slide."""
        place = self.place
        corners, side = place.to_slide(self.positions[:, ::-1]), self.side * sum(place.scale) / 2
        return Places(self.slide.path, corners, side=side, slide=place.shape)

    def whole(self) -> Image:
        """The image that the patches are cut from."""
        return Image(self.slide, factor=self._factor, threads=self._threads)

    def load(self, box: Box) -> Tensor:
        """The pixels (patches, 3, height, width) of a box of patches."""
        corners, height, width = self._corners(box)
        out = room(self._planar, len(corners), CHANNELS, height, width)
        if not out.size:
            return torch.from_numpy(out)
        if (corners < 0).any() or (corners > np.array(self.size) - (height, width)).any():
            out[...] = FILL
        touched = _touched(corners, height, width, self.block, self.size)

        def fill(cell: Cell) -> None:
            block = self._blocks.get(cell)
            for number in touched[cell]:
                y, x = corners[number].tolist()
                paste(out[number], block, self.block, cell, y, x, self.size)

        self._in_threads(fill, sorted(touched))
        return torch.from_numpy(out)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if the box is known to hold nothing else."""
        self._here()
        corners, height, width = self._corners(box)
        rows, columns = self.size
        for y, x in corners.tolist():
            top, left, bottom, right = max(y, 0), max(x, 0), min(y + height, rows), min(x + width, columns)
            if top < bottom and left < right and not self.image.empty(top, left, bottom - top, right - left):
                return None
        return torch.full((CHANNELS,), FILL, dtype=self.dtype) if corners.size and height * width else None

    def _corners(self, box: Box) -> tuple[Positions, int, int]:
        """The corners of the parts of patches that a box means, in the image, and their height and width."""
        ends = (self.shape[0], self.side, self.side)
        if box.ndim != 3 or any(not 0 <= lo <= hi <= end for (lo, hi), end in zip(box.intervals(), ends)):
            raise IndexError(f"{box} leaves the {self.shape[0]} patches of {self.side} x {self.side} of {self.name}")
        (first, y, x), (last, *_) = box.lo, box.hi
        return self.positions[first:last] + np.array([y, x], np.int32), box.extent[1], box.extent[2]


def cells_of(y: int, x: int, height: int, width: int, size: int) -> list[Cell]:
    """The blocks that a box inside an image touches."""
    rows = range(y // size, (y + height - 1) // size + 1)
    columns = range(x // size, (x + width - 1) // size + 1)
    return [(row, column) for row in rows for column in columns]


def paste(
    out: Block, block: Block | None, size: int, cell: Cell, y: int, x: int, ends: tuple[int, int] | None = None
) -> None:
    """Copies the part of a block that lies in the box whose corner is (y, x), within an image of this size."""
    rows, columns = ends or (y + out.shape[1], x + out.shape[2])
    top, left = max(cell[0] * size, y), max(cell[1] * size, x)
    bottom = min((cell[0] + 1) * size, y + out.shape[1], rows)
    right = min((cell[1] + 1) * size, x + out.shape[2], columns)
    target = out[:, top - y : bottom - y, left - x : right - x]
    if block is None:
        target[...] = FILL
    else:
        y0, x0 = cell[0] * size, cell[1] * size
        target[...] = block[:, top - y0 : bottom - y0, left - x0 : right - x0]


def _touched(corners: Positions, height: int, width: int, size: int, shape: tuple[int, int]) -> dict[Cell, list[int]]:
    """The blocks inside an image that rectangles touch, each with the numbers of these."""
    found: dict[Cell, list[int]] = {}
    for number, (y, x) in enumerate(corners.tolist()):
        top, left, bottom, right = max(y, 0), max(x, 0), min(y + height, shape[0]), min(x + width, shape[1])
        if top < bottom and left < right:
            for cell in cells_of(top, left, bottom - top, right - left, size):
                found.setdefault(cell, []).append(number)
    return found


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
