"""A map in a temporary file, read and written by position.

Space is outermost and everything else innermost, so that a row of a box is one piece of the file. Mapped pages would
count as the process's memory, so nothing is mapped.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.errors import EngineError
from lightning_plugin.layout import Axis, Layout, plain_strides
from lightning_plugin.residency.file import UnnamedFile
from lightning_plugin.residency.numbered import Numbered, parts_of
from lightning_plugin.residency.pool import Lend
from lightning_plugin.residency.transfer import Transfer

#: PyTorch turns a matrix of so many rows in blocks; so many threads are not faster at it without blocks.
LEAST_ROWS, FEW_THREADS = 16, 2
#: The files of all maps that are on the disk now.
OPEN: weakref.WeakSet[DiskFile] = weakref.WeakSet()
#: Threads that run networks of their own open maps at the same time.
OPENING = threading.Lock()


class DiskFile:
    """One map's bytes; tiles are in the map's own layout. See `transfer.Lower`."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        folder: str | None = None,
        made: Numbered | None = None,
    ) -> None:
        self.layout = layout
        self.made = made
        self.dtype = dtype
        self.device = device
        factors = [f for dim in layout.dims for f in dim]
        self.axes = [i for i, f in enumerate(factors) if isinstance(f, Axis)]
        self.axes.sort(key=lambda i: factors[i].index)  # type: ignore[union-attr]
        self.order = [*self.axes, *(i for i in range(len(factors)) if i not in self.axes)]
        self.back = [self.order.index(i) for i in range(len(factors))]
        self.plain = 1
        for f in factors:
            self.plain *= f if not isinstance(f, Axis) else 1
        self.item = dtype.itemsize * self.plain
        self.make(self.item * Box.whole(layout.extent).positions, folder)

    def make(self, size: int, folder: str | None) -> None:
        """Open a file without a name, where there is room for it beside what other maps there have still to fill."""
        self.file = UnnamedFile("a map", folder)
        self.size = size
        with OPENING:
            others = sum(f.unfilled for f in OPEN if f.file.folder == self.file.folder)
        free = shutil.disk_usage(self.file.folder).free - others
        if size > free:
            raise EngineError(
                f"storing a map of {size / 2**30:.1f} GiB in {self.file.folder} is not possible: "
                f"{max(0, free) / 2**30:.1f} GiB are free beside the maps that are there. Give disk=<a folder with "
                "more room> or a larger budget."
            )
        os.truncate(self.file.number, size)
        with OPENING:
            OPEN.add(self)

    @property
    def unfilled(self) -> int:
        """The bytes of the file that have no room on the disk yet, and may need it: tiles for which others stand are
        never written."""
        spared = 0 if self.made is None else self.item * self.made.spared
        return max(0, self.size - spared - self.file.filled)

    def sending(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held = [self.staged(box, tile, lend)]
        return Transfer(held, lambda: self._each_row(box, self.rows(box, held[0]), write=True))

    def fetching(self, box: Box, lend: Lend) -> Transfer:
        held, parts = [self.room(box, lend)], parts_of(self.made, box)

        def result() -> Tensor:
            return plain_strides(held[0].to(self.device).permute(self.back).reshape(self.layout.tile_shape(box)))

        def run() -> None:
            rows, read = self.rows(box, held[0]), dict[Box, np.ndarray]()
            for part, there in parts:
                here = rows[tuple(slice(a - lo, b - lo) for (a, b), lo in zip(part.intervals(), box.lo, strict=True))]
                if there in read:
                    here[...] = read[there]
                else:
                    self._each_row(there, here, write=False)
                    read[there] = here

        return Transfer(held, run, result)

    def adding(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held = [self.staged(box, tile, lend), self.room(box, lend)]

        def run() -> None:
            self._each_row(box, self.rows(box, held[1]), write=False)
            # By numpy: a thread beside the one that computes must not ask PyTorch's threads for help.
            np.add(held[1].numpy(), held[0].numpy(), out=held[1].numpy())
            self._each_row(box, self.rows(box, held[1]), write=True)

        return Transfer(held, run)

    def staged(self, box: Box, tile: Tensor, lend: Lend) -> Tensor:
        """A tile as the file has it: itself, where it is that already."""
        part = self.layout.spread(tile, box).permute(self.order)
        if part.device.type != "cpu":
            part = landed(part, lend)
        if part.dtype == self.dtype and part.is_contiguous():
            return part
        return rearranged(part, self.room(box, lend))

    def room(self, box: Box, lend: Lend) -> Tensor:
        """Memory for a tile as the file has it."""
        shape = [size for dim in self.layout.dims for size in self.layout.sizes(dim, box)]
        return lend([shape[i] for i in self.order], self.dtype)

    def rows(self, box: Box, data: Tensor) -> np.ndarray:
        """The bytes at each position of a box of what lies as in the file."""
        return data.view(-1).view(torch.uint8).view(*box.extent, self.item).numpy()

    def _each_row(self, box: Box, data: np.ndarray, write: bool) -> None:
        """Move whole rows of the last axis between the file and ``data``, joining rows that lie side by side."""
        extent, lo, hi = self.layout.extent, box.lo, box.hi
        run = len(extent) - 1  # the axes after ``run`` are full, so that a slab of axis ``run`` is one piece
        while run > 0 and lo[run] == 0 and hi[run] == extent[run] and data.flags.c_contiguous:
            run -= 1
        strides = [self.item] * len(extent)
        for a in reversed(range(len(extent) - 1)):
            strides[a] = strides[a + 1] * extent[a + 1]
        move = self.file.write if write else self.file.read
        for index in itertools.product(*(range(hi[a] - lo[a]) for a in range(run))):
            offset = sum((i + first) * s for i, first, s in zip((*index, 0), lo, strides, strict=False))
            move(memoryview(data[index].reshape(-1)), offset)


def rearranged(part: Tensor, room: Tensor) -> Tensor:
    """A tile in the order of the file, in memory for that. Where channels only go behind positions it is one matrix
    that is turned, for which PyTorch has a kernel of one thread, some times as fast as that of all other copies."""
    dims = part.dim()
    if torch.get_num_threads() <= FEW_THREADS:
        for first in range(1, dims):
            turned = part.permute(*range(first, dims), *range(first))
            rows = math.prod(turned.shape[: dims - first])
            if rows >= LEAST_ROWS and turned.is_contiguous():
                room.view(-1, rows).copy_(turned.reshape(rows, -1).t())
                return room
    return room.copy_(part)


def landed(tile: Tensor, lend: Lend) -> Tensor:
    """A tile of another device on the host, as it lies there: to reorder it, that device would need memory."""
    order = sorted(range(tile.dim()), key=tile.stride, reverse=True)
    back = [order.index(i) for i in range(tile.dim())]
    there = tile.permute(order)
    return lend(there.shape, tile.dtype).copy_(there).permute(back)
