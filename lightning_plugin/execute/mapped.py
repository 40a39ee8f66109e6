"""Files whose memory is mapped, for tensors that live on the disk and are ordinary tensors to everybody.

A file has no name from the moment it is open, so that its space comes back whatever happens to the process. Its space
is taken at once: a full disk is an error here, not a fault of memory later. Pages that were read or written through
the mapping are given back to the system by `rest`; the values stay.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile

import torch
from torch import Tensor

from lightning_plugin.errors import DiskError
from lightning_plugin.units import format_bytes


class MappedFile:
    """The file of one tensor."""

    def __init__(self, size: int, folder: str | None = None) -> None:
        self.folder = folder or tempfile.gettempdir()
        self.file, name = tempfile.mkstemp(prefix="lightning-plugin-", dir=self.folder)
        os.unlink(name)
        try:
            os.posix_fallocate(self.file, 0, size)
        except OSError as error:
            raise self.failed(f"has no room for {format_bytes(size)} more", error) from error
        self.map = mmap.mmap(self.file, size)

    def __del__(self) -> None:
        file = getattr(self, "file", None)
        if file is not None:
            os.close(file)

    def tensor_like(self, other: Tensor) -> Tensor:
        """A tensor whose memory is the file's, and which lies there as another does in its own. It keeps the mapping,
        and not this."""
        flat = torch.frombuffer(self.map, dtype=other.dtype, count=other.numel())
        return flat.as_strided(other.shape, other.stride())

    def read_into(self, room: Tensor) -> None:
        """Read all values, past the mapping, into a tensor that lies in memory as they do."""
        self._move(room, write=False)

    def write_from(self, values: Tensor) -> None:
        """Write all values, past the mapping, from a tensor that lies in memory as they shall."""
        self._move(values, write=True)

    def rest(self) -> None:
        """Let the process's pages go."""
        self.map.madvise(mmap.MADV_DONTNEED)

    def _move(self, tensor: Tensor, write: bool) -> None:
        part, offset = memoryview(flat_bytes(tensor).numpy()), 0  # type: ignore[arg-type]
        while part:
            try:
                done = os.pwrite(self.file, part, offset) if write else os.preadv(self.file, [part], offset)
            except OSError as error:
                raise self.failed("could not be written" if write else "could not be read", error) from error
            if not done:
                raise self.failed("ended early", OSError(errno.EIO, os.strerror(errno.EIO)))
            part, offset = part[done:], offset + done

    def failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(
            f"a parameter's file in {self.folder} {what}: {error.strerror or error}. Make room there, or give "
            "disk=<another folder> or a larger budget."
        )


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
