"""The disk: maps and parameters in temporary files without names.

A map is read and written by position: space is outermost and everything else innermost, so that a row of a box is one
piece of the file. Mapped pages would count as the process's memory, so a map is not mapped. A parameter is.

A file never has a name where the system can do without, and loses it as soon as it is open elsewhere: whatever happens
to the process, its space comes back. Reads and writes say their position, where the system has such calls; elsewhere
(Windows) the position is set before, under a lock.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Numbered, parts_of
from lightning_plugin.errors import DiskError, EngineError
from lightning_plugin.layout import Axis, Layout, plain_strides
from lightning_plugin.residency.transfer import Lend, Transfer
from lightning_plugin.units import format_bytes


class UnnamedFile:
    """A file in a folder; ``noun`` is its content, for errors."""

    def __init__(self, noun: str, folder: str | None = None) -> None:
        self.noun = noun
        self.folder = folder or tempfile.gettempdir()
        try:
            self.file = tempfile.TemporaryFile(prefix="lightning-plugin-", dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self.failed("could not be made", error) from error
        self.number = self.file.fileno()
        self.moving = threading.Lock()

    def __del__(self) -> None:
        file = getattr(self, "file", None)
        if file is not None:
            file.close()

    @property
    def filled(self) -> int:
        """The bytes that have room on the disk; all of them where the system does not tell."""
        status = os.fstat(self.number)
        return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size

    def reserve(self, size: int) -> None:
        """Take space on the disk now, so that a full disk is an error here. Where the system cannot (macOS), zeros are
        written."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.number, 0, size)
            except OSError as error:
                raise self.failed(f"has no room for {format_bytes(size)} more", error) from error
            return
        zeros = memoryview(bytes(min(size, 1 << 20)))
        for offset in range(0, size, len(zeros)):
            self.write(zeros[: size - offset], offset)

    def read(self, part: memoryview, offset: int) -> None:
        self._move(self.some_read, "could not be read", part, offset)

    def write(self, part: memoryview, offset: int) -> None:
        self._move(self.some_written, "could not be written", part, offset)

    def some_read(self, part: memoryview, offset: int) -> int:
        """Read what one call gives; how many bytes."""
        if hasattr(os, "preadv"):
            return os.preadv(self.number, [part], offset)
        with self.moving:
            self.file.seek(offset)
            return self.file.readinto(part)

    def some_written(self, part: memoryview, offset: int) -> int:
        """Write what one call takes; how many bytes."""
        if hasattr(os, "pwrite"):
            return os.pwrite(self.number, part, offset)
        with self.moving:
            self.file.seek(offset)
            return self.file.write(part)

    def _move(self, move: Callable[[memoryview, int], int], problem: str, part: memoryview, offset: int) -> None:
        while part:
            try:
                done = move(part, offset)
            except OSError as error:
                raise self.failed(problem, error) from error
            if not done:
                raise self.failed("ended early", OSError(errno.EIO, os.strerror(errno.EIO)))
            part, offset = part[done:], offset + done

    def failed(self, problem: str, error: OSError) -> DiskError:
        return DiskError(
            f"the file of {self.noun} in {self.folder} {problem}: {error.strerror or error}. Make room there, or give "
            "disk=<another folder> or a larger budget."
        )


class MappedFile:
    """The file of one tensor."""

    def __init__(self, size: int, folder: str | None = None) -> None:
        self.file = UnnamedFile("a parameter", folder)
        self.file.reserve(size)
        self.map = mmap.mmap(self.file.number, size)

    def tensor_like(self, other: Tensor) -> Tensor:
        """A tensor whose memory is the file's, and which lies there as another does in its own. It keeps the mapping,
        and not this."""
        flat = torch.frombuffer(self.map, dtype=other.dtype, count=other.numel())
        return flat.as_strided(other.shape, other.stride())

    def read_into(self, room: Tensor) -> None:
        """Read all values, past the mapping, into a tensor that lies in memory as they do."""
        self.file.read(memory_of(room), 0)

    def write_from(self, values: Tensor) -> None:
        """Write all values, past the mapping, from a tensor that lies in memory as they shall."""
        self.file.write(memory_of(values), 0)

    def rest(self) -> None:
        """Let the process's pages go, where the system can be asked to."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that fills its memory, on the host."""
    return memoryview(flat_bytes(tensor).numpy())  # type: ignore[arg-type]


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def fills_its_memory(tensor: Tensor) -> bool:
    """True if a tensor is all that lies in its memory, each number once."""
    if tensor.layout != torch.strided or tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
        return flat_bytes(data).view(*box.extent, self.item).numpy()

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
