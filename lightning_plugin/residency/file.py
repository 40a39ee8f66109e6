"""Files without a name, read and written by position.

A file never has one where the system can do without, and loses it as soon as it is open elsewhere: whatever happens to
the process, its space comes back. Reads and writes say their position, where the system has such calls; elsewhere
(Windows) the position is set before, under a lock.

Their space is taken at once: a full disk is an error here, not a fault of memory later. Pages that were read or written
through the mapping are given back to the system by `rest`; the values stay.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_plugin.errors import DiskError
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
    """Whether a tensor is all that lies in its memory, each number once."""
    if tensor.layout != torch.strided or tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
