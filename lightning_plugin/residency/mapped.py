"""Files whose memory is mapped, for tensors that live on the disk and are ordinary tensors to everybody.

Their space is taken at once: a full disk is an error here, not a fault of memory later. Pages that were read or written
through the mapping are given back to the system by `rest`; the values stay.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from lightning_plugin.residency.file import UnnamedFile


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
        """Let the process's pages go."""
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
