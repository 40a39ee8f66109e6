"""The disk: maps and parameters in temporary files without names.

In the file of a map, images and space are outermost and all other dimensions are innermost, so that some images of a
bag, or a row of a box, are contiguous. Maps are not mapped, since mapped pages would count as the process's memory.
Parameters are.

A file has no name, or loses it as soon as it is open, so that its space is freed whatever happens to the process. Reads
and writes are positional (``preadv``, ``pwrite``); on Windows, which lacks these calls, they seek first, under a lock.
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
from lightning_plugin.constants import TileNumbers, stored_parts
from lightning_plugin.errors import DiskError, EngineError
from lightning_plugin.layout import Axis, Layout, plain_strides
from lightning_plugin.residency.transfer import Lend, Transfer
from lightning_plugin.units import format_bytes


class UnnamedFile:
    """A temporary file in a folder; error messages name its content by ``noun``."""

    def __init__(self, noun: str, folder: str | None = None) -> None:
        self.noun = noun
        self.folder = folder or tempfile.gettempdir()
        try:
            self.file = tempfile.TemporaryFile(prefix="lightning-plugin-", dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self.error("could not be made", error) from error
        self.number = self.file.fileno()
        self.seek_lock = threading.Lock()

    def __del__(self) -> None:
        file = getattr(self, "file", None)
        if file is not None:
            file.close()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated on the disk; the file's size on a system that does not tell."""
        status = os.fstat(self.number)
        return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size

    def reserve(self, size: int) -> None:
        """Allocate space on the disk now, so that a full disk is an error here. On a system that cannot (macOS), write
        zeros."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.number, 0, size)
            except OSError as error:
                raise self.error(f"has no room for {format_bytes(size)} more", error) from error
            return
        zeros = memoryview(bytes(min(size, 1 << 20)))
        for offset in range(0, size, len(zeros)):
            self.write(zeros[: size - offset], offset)

    def read(self, part: memoryview, offset: int) -> None:
        self._move(self._read_some, "could not be read", part, offset)

    def write(self, part: memoryview, offset: int) -> None:
        self._move(self._write_some, "could not be written", part, offset)

    def _read_some(self, part: memoryview, offset: int) -> int:
        """Read with one call, and return the number of bytes, which may be fewer than asked for."""
        if hasattr(os, "preadv"):
            return os.preadv(self.number, [part], offset)
        with self.seek_lock:
            self.file.seek(offset)
            return self.file.readinto(part)

    def _write_some(self, part: memoryview, offset: int) -> int:
        """Write with one call, and return the number of bytes, which may be fewer than asked for."""
        if hasattr(os, "pwrite"):
            return os.pwrite(self.number, part, offset)
        with self.seek_lock:
            self.file.seek(offset)
            return self.file.write(part)

    def _move(self, move: Callable[[memoryview, int], int], problem: str, part: memoryview, offset: int) -> None:
        while part:
            try:
                done = move(part, offset)
            except OSError as error:
                raise self.error(problem, error) from error
            if not done:
                raise self.error("ended early", OSError(errno.EIO, os.strerror(errno.EIO)))
            part, offset = part[done:], offset + done

    def error(self, problem: str, error: OSError) -> DiskError:
        return DiskError(
            f"the file of {self.noun} in {self.folder} {problem}: {error.strerror or error}. Make room there, or give "
            "disk=<another folder> or a larger budget."
        )


class MappedFile:
    """A memory-mapped file of one tensor."""

    def __init__(self, size: int, folder: str | None = None) -> None:
        self.file = UnnamedFile("a parameter", folder)
        self.file.reserve(size)
        self.map = mmap.mmap(self.file.number, size)

    def tensor_like(self, other: Tensor) -> Tensor:
        """Return a tensor in the file's memory, with another's shape and strides. It keeps the mapping alive."""
        flat = torch.frombuffer(self.map, dtype=other.dtype, count=other.numel())
        return flat.as_strided(other.shape, other.stride())

    def read_into(self, room: Tensor) -> None:
        """Read all values into a tensor of the same strides, without touching the mapped pages."""
        self.file.read(memoryview_of(room), 0)

    def write_from(self, values: Tensor) -> None:
        """Write all values from a tensor of the same strides, without touching the mapped pages."""
        self.file.write(memoryview_of(values), 0)

    def release_pages(self) -> None:
        """Release the mapped pages from the process's memory, if the system can do that."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


def memoryview_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the host."""
    return memoryview(flat_bytes(tensor).numpy())  # type: ignore[arg-type]


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in memory order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # whose bytes would be those of the other tensor
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def fills_its_memory(tensor: Tensor) -> bool:
    """True if a tensor is dense: its elements fill its storage, each element once."""
    if tensor.layout != torch.strided or tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


#: PyTorch transposes a matrix of ``MIN_ROWS`` rows or more in blocks, in one thread: faster than its other copies in up
#: to ``FEW_THREADS`` threads.
MIN_ROWS, FEW_THREADS = 16, 2
#: The files of all maps on the disk.
OPEN_FILES: weakref.WeakSet[DiskFile] = weakref.WeakSet()
#: Lock of ``OPEN_FILES``: several threads may run networks.
OPEN_LOCK = threading.Lock()


def check_space(size: int, folder: str | None, noun: str) -> None:
    """Refuse to store so many bytes in a folder without space for them and for the unwritten parts of open files."""
    folder = folder or tempfile.gettempdir()
    with OPEN_LOCK:
        others = sum(f.unallocated_bytes for f in OPEN_FILES if f.file.folder == folder)
    free = shutil.disk_usage(folder).free - others
    if size > free:
        raise EngineError(
            f"storing {noun} of {size / 2**30:.1f} GiB in {folder} is not possible: {max(0, free) / 2**30:.1f} GiB are "
            "free beside the maps that are there. Give disk=<a folder with more room> or a larger budget."
        )


class DiskFile:
    """A map in a file; see `transfer.Lower`.

    Attributes:
        axes: The axes in the order of the file, which is that of the tensor's dimensions: images before space.
        order: The factors of the map's layout in the order of the file: axes first.
        inverse_order: The place of each factor in the file.
        position_bytes: Bytes at each position of the axes.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        folder: str | None = None,
        numbered: TileNumbers | None = None,
    ) -> None:
        self.layout = layout
        self.numbered = numbered
        self.dtype = dtype
        self.device = device
        factors = [f for dim in layout.dims for f in dim]
        self.axes = [f.index for f in factors if isinstance(f, Axis)]
        self.order = sorted(range(len(factors)), key=lambda i: not isinstance(factors[i], Axis))
        self.inverse_order = [self.order.index(i) for i in range(len(factors))]
        self.position_bytes = dtype.itemsize * math.prod(f for f in factors if not isinstance(f, Axis))
        self.open(self.position_bytes * Box.whole(layout.extent).positions, folder)

    def open(self, size: int, folder: str | None) -> None:
        """Open the file, and refuse if the disk lacks space for it and for the unwritten parts of other maps."""
        self.file = UnnamedFile("a map", folder)
        self.size = size
        check_space(size, self.file.folder, "a map")
        os.truncate(self.file.number, size)
        with OPEN_LOCK:
            OPEN_FILES.add(self)

    @property
    def unallocated_bytes(self) -> int:
        """Bytes of the file that writes may still allocate on the disk; tiles equal to others are never written."""
        spared = 0 if self.numbered is None else self.position_bytes * self.numbered.shared_positions
        return max(0, self.size - spared - self.file.allocated_bytes)

    def prepare_write(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held = [self.to_file_order(box, tile, lend)]
        return Transfer(held, lambda: self._move_rows(box, self.bytes_by_position(box, held[0]), write=True))

    def prepare_read(self, box: Box, lend: Lend) -> Transfer:
        held, parts = [self.lend_tile(box, lend)], stored_parts(self.numbered, box)

        def result() -> Tensor:
            tile = held[0].to(self.device).permute(self.inverse_order)
            return plain_strides(tile.reshape(self.layout.tile_shape(box)))

        def run() -> None:
            rows, read = self.bytes_by_position(box, held[0]), dict[Box, np.ndarray]()
            for part, there in parts:
                here = rows[tuple(slice(part.lo[a] - box.lo[a], part.hi[a] - box.lo[a]) for a in self.axes)]
                if there in read:
                    here[...] = read[there]
                else:
                    self._move_rows(there, here, write=False)
                    read[there] = here

        return Transfer(held, run, result)

    def prepare_add(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held = [self.to_file_order(box, tile, lend), self.lend_tile(box, lend)]

        def run() -> None:
            self._move_rows(box, self.bytes_by_position(box, held[1]), write=False)
            # By numpy: the transfer thread must not use PyTorch's thread pool.
            np.add(held[1].numpy(), held[0].numpy(), out=held[1].numpy())
            self._move_rows(box, self.bytes_by_position(box, held[1]), write=True)

        return Transfer(held, run)

    def to_file_order(self, box: Box, tile: Tensor, lend: Lend) -> Tensor:
        """Return a tile in the file's order and type; without a copy if it has them."""
        part = self.layout.unflatten_factors(tile, box).permute(self.order)
        if part.device.type != "cpu":
            part = copy_to_host(part, lend)
        if part.dtype == self.dtype and part.is_contiguous():
            return part
        return copy_in_file_order(part, self.lend_tile(box, lend))

    def lend_tile(self, box: Box, lend: Lend) -> Tensor:
        """Borrow memory for a tile in the file's order and type."""
        shape = [size for dim in self.layout.dims for size in self.layout.sizes(dim, box)]
        return lend([shape[i] for i in self.order], self.dtype)

    def bytes_by_position(self, box: Box, data: Tensor) -> np.ndarray:
        """Return the bytes of a tile in the file's order, by position in the box."""
        return flat_bytes(data).view(*(box.extent[a] for a in self.axes), self.position_bytes).numpy()

    def _move_rows(self, box: Box, data: np.ndarray, write: bool) -> None:
        """Read or write rows of the last axis between the file and ``data``; adjacent rows in one call."""
        extent, lo, hi = ([sizes[a] for a in self.axes] for sizes in (self.layout.extent, box.lo, box.hi))
        run = len(extent) - 1  # the axes after ``run`` are full, so that a slab of axis ``run`` is one piece
        while run > 0 and lo[run] == 0 and hi[run] == extent[run] and data.flags.c_contiguous:
            run -= 1
        strides = [self.position_bytes] * len(extent)
        for a in reversed(range(len(extent) - 1)):
            strides[a] = strides[a + 1] * extent[a + 1]
        move = self.file.write if write else self.file.read
        for index in itertools.product(*(range(hi[a] - lo[a]) for a in range(run))):
            offset = sum((i + first) * s for i, first, s in zip((*index, 0), lo, strides, strict=False))
            move(memoryview(data[index].reshape(-1)), offset)


def copy_in_file_order(part: Tensor, room: Tensor) -> Tensor:
    """Copy a tile to memory in the order of the file.

    If the dimensions are only rotated (channels behind positions), this is a matrix transpose, for which PyTorch has a
    kernel that is several times as fast in one thread as its other copies.
    """
    dims = part.dim()
    if torch.get_num_threads() <= FEW_THREADS:
        for first in range(1, dims):
            turned = part.permute(*range(first, dims), *range(first))
            rows = math.prod(turned.shape[: dims - first])
            if rows >= MIN_ROWS and turned.is_contiguous():
                room.view(-1, rows).copy_(turned.reshape(rows, -1).t())
                return room
    return room.copy_(part)


def copy_to_host(tile: Tensor, lend: Lend) -> Tensor:
    """Copy a tile to the host in its memory order: reordering it would take memory on its device."""
    order = sorted(range(tile.dim()), key=tile.stride, reverse=True)
    back = [order.index(i) for i in range(tile.dim())]
    there = tile.permute(order)
    return lend(there.shape, tile.dtype).copy_(there).permute(back)
