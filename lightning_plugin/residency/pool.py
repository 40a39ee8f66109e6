"""Buffers of the transfers to the disk, lent again and again while a segment passes over its tiles.

[Note: pool] A pass over a segment's tiles, forward or backward, has one pool, and every transfer of the pass borrows
from it. What is lent is a tensor with a storage of its own over the buffer's bytes: when nothing refers to that storage
any more, be it an operator, autograd, a view or a transfer, the buffer is free again, and not before. A request takes
the smallest free buffer that holds it, else a new one, in place of a free one that is too small: there are never more
buffers than were lent at once. What is asked for a map is always what its largest tile of the pass needs, so that all
tiles ask for the same and none has to make a buffer that earlier ones, or those of a rehearsal, did not have. Buffers
are made by the thread that computes, where the ledger sees them, once; it does not see what is lent. A pool lasts as
long as its pass: sizes differ from one pass to the next, and between segments nothing is held.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin.boxes import Box

#: Lends memory for a transfer, by shape and dtype.
Lend = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(eq=False)
class Buffer:
    """Bytes that are lent."""

    data: Tensor

    @property
    def size(self) -> int:
        return self.data.nbytes

    def alias(self, size: int, fakes: bool) -> Tensor:
        """The first bytes, as a tensor with a storage of its own."""
        if fakes:  # a fake tensor has no bytes to share: one of the size that no ledger counts
            return torch.empty(0, dtype=torch.uint8).resize_(size)
        return torch.from_numpy(self.data.numpy()[:size])


class Pool:
    """The buffers of one pass; see [Note: pool]. One that is not open takes none back: each is used once. ``fakes``:
    the pass is rehearsed."""

    def __init__(self, open: bool = True, fakes: bool = False) -> None:
        self.free: list[Buffer] = []
        self.open = open
        self.fakes = fakes

    def lender(self, box: Box, largest: int) -> Lend:
        """A function that lends what the transfer of a box needs, as much as for the largest box of its map."""
        here = max(1, box.positions)
        most = max(largest, here) if self.open else here

        def lend(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return self.lend(shape, dtype, math.prod(shape) * dtype.itemsize * most // here)

        return lend

    def lend(self, shape: Sequence[int], dtype: torch.dtype, least: int = 0) -> Tensor:
        """A tensor for one transfer, in a buffer of at least so many bytes."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self.take(max(size, least))
        lent = buffer.alias(size, self.fakes)
        weakref.finalize(lent.untyped_storage(), self.take_back, buffer).atexit = False
        return lent.view(dtype).view(shape)

    def take(self, size: int) -> Buffer:
        """The smallest free buffer that is large enough, or a new one instead of the largest that is not."""
        fitting = [b for b in self.free if b.size >= size]
        if fitting:
            return self.out(min(fitting, key=lambda b: b.size))
        if self.free:  # the one that is replaced is gone before memory for the new one is asked for
            self.out(max(self.free, key=lambda b: b.size))
        return self.make(size)

    def out(self, buffer: Buffer) -> Buffer:
        """A free buffer, no longer among the free ones."""
        self.free.remove(buffer)
        return buffer

    def make(self, size: int) -> Buffer:
        return Buffer(torch.empty(size, dtype=torch.uint8))

    def take_back(self, buffer: Buffer) -> None:
        if self.open:
            self.free.append(buffer)

    def close(self) -> None:
        """The pass is over: free buffers go now, and each of the others when what is lent of it does."""
        self.open = False
        self.free.clear()
