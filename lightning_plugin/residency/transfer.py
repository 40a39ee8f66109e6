"""Moving tiles and copies between the device and a lower tier, at once or beside the work on other tiles.

[Note: ahead] A segment that transfers *ahead* hands its writes to a thread, and prefetches the inputs of its next tile
while it computes the current one. All maps of a run share one thread, first in first out: a read comes after the writes
that were queued before it, and an addition after the reads. Memory is bounded and known beforehand: at most one write
to a map is pending, at most one tile of it is prefetched, and the computing thread borrows all buffers of a transfer,
so that the ledger and a rehearsal count them; see [Note: pool]. The error of a failed transfer is raised at the map's
next transfer, or at the end of the segment. Copies of streamed tensors have a transfer queue of their own: they are
large, and a tile would wait behind them. CUDA has a stream for transfers; on other devices the caller does the work.

[Note: pool] A pass over a segment's tiles, forward or backward, has one pool, and every transfer of the pass borrows
from it. It lends a tensor with a storage of its own over the buffer's bytes. The buffer is free again when no operator,
view, transfer or graph of autograd refers to that storage. A request takes the smallest free buffer that is large
enough; otherwise a new buffer replaces the largest free one: there are never more buffers than were lent at once. Each
request for a map has the size of its largest tile in the pass, so that no tile needs a buffer that earlier tiles, or
those of a rehearsal, did not have. The computing thread allocates buffers, and the ledger counts each once; it does not
count the tensors that are lent. A pool lasts as long as its pass: sizes differ between passes, and no buffer is held
between segments.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import TileNumbers
from lightning_plugin.layout import Layout
from lightning_plugin.progress import Progress, profiler_range

#: Lends memory for a transfer, by shape and dtype.
Lend = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(eq=False)
class Buffer:
    """Memory that a pool lends."""

    data: Tensor

    @property
    def size(self) -> int:
        return self.data.nbytes

    def alias(self, size: int, fakes: bool) -> Tensor:
        """Return the first bytes as a tensor with a storage of its own."""
        if fakes:  # a fake tensor has no bytes to share; a resized one is not counted by the ledger
            return torch.empty(0, dtype=torch.uint8).resize_(size)
        return torch.from_numpy(self.data.numpy()[:size])


class Pool:
    """The buffers of one pass; see [Note: pool].

    Attributes:
        free: The buffers that are not lent.
        open: Keep buffers that are returned. If False, each buffer is used once.
        fakes: The pass is rehearsed, on fake tensors.
    """

    def __init__(self, open: bool = True, fakes: bool = False) -> None:
        self.free: list[Buffer] = []
        self.open = open
        self.fakes = fakes

    def lender(self, box: Box, largest: int) -> Lend:
        """Return a function that lends memory for the transfer of a box, in buffers that the map's ``largest`` box
        would fit into."""
        positions = max(1, box.positions)
        most = max(largest, positions) if self.open else positions

        def lend(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return self.lend(shape, dtype, math.prod(shape) * dtype.itemsize * most // positions)

        return lend

    def lend(self, shape: Sequence[int], dtype: torch.dtype, least: int = 0) -> Tensor:
        """Lend a tensor for one transfer, in a buffer of at least ``least`` bytes."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self.take_buffer(max(size, least))
        lent = buffer.alias(size, self.fakes)
        weakref.finalize(lent.untyped_storage(), self.take_back, buffer).atexit = False
        return lent.view(dtype).view(shape)

    def take_buffer(self, size: int) -> Buffer:
        """Take the smallest free buffer that is large enough; if there is none, replace the largest by a new one."""
        fitting = [b for b in self.free if b.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda b: b.size)
            self.free.remove(buffer)
            return buffer
        if self.free:  # freed before the new one is allocated
            self.free.remove(max(self.free, key=lambda b: b.size))
        return self.make_buffer(size)

    def make_buffer(self, size: int) -> Buffer:
        return Buffer(torch.empty(size, dtype=torch.uint8))

    def take_back(self, buffer: Buffer) -> None:
        if self.open:
            self.free.append(buffer)

    def close(self) -> None:
        """Free all buffers at the end of the pass: those that are lent, when their tensors are freed."""
        self.open = False
        self.free.clear()


@cache
def transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device's transfers run."""
    return torch.cuda.Stream(device)


def event_after_launched(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind all kernels launched until now, for which a transfer waits before it touches its tile;
    None on devices other than CUDA."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def run_on_transfer_stream(
    device: torch.device, work: Callable[[], object], ready: torch.cuda.Event | None
) -> torch.cuda.Event | None:
    """Launch work on the transfer stream after the event ``ready``, and return the event of its end. Without ``ready``
    the work is done at once, and there is no event."""
    if ready is None:
        work()
        return None
    stream = transfer_stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        work()
        return stream.record_event()


def wait_for_event(device: torch.device, done: torch.cuda.Event | None) -> None:
    """Make the device's next kernels wait for an event of the transfer stream."""
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)


Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Transfer:
    """A prepared transfer.

    Attributes:
        held: The tensors of the transfer. Nothing else refers to them, so that the computing thread frees them by
            clearing this list.
        run: Does the transfer, in any thread.
        result: Returns the tile that was read; None for a write.
    """

    held: list[Tensor]
    run: Callable[[], None]
    result: Callable[[], Tensor] | None = None


def transfer_to_device(
    room: Tensor, work: Callable[[Tensor], object], last: Callable[[torch.cuda.Event | None], None] | None = None
) -> Transfer:
    """Prepare a transfer to memory on the device.

    Args:
        room: The memory. Kernels of its former tensor may still be queued: the transfer waits for them.
        work: Copies into the memory.
        last: Called with the event of the transfer's end.
    """
    device, held, ready = room.device, [room], event_after_launched(room.device)
    done: list[torch.cuda.Event | None] = []

    def run() -> None:
        done.append(run_on_transfer_stream(device, lambda: work(held[0]), ready))
        if last is not None:
            last(done[0])

    def result() -> Tensor:
        wait_for_event(device, done[0] if done else None)
        return held[0]

    return Transfer(held, run, result)


class Lower(Protocol):
    """A map on a lower tier. Each method prepares a transfer, in buffers that it borrows.

    Attributes:
        numbered: Tiles that are not stored, since another tile has the same contents.
    """

    numbered: TileNumbers | None

    def prepare_write(self, box: Box, tile: Tensor, lend: Lend) -> Transfer: ...

    def prepare_read(self, box: Box, lend: Lend) -> Transfer: ...

    def prepare_add(self, box: Box, tile: Tensor, lend: Lend) -> Transfer: ...


#: Makes the stand-in of a map on a lower tier for a rehearsal, by layout, dtype, device and tier.
MakeStandIn = Callable[[Layout, torch.dtype, torch.device, str], Any]


class Pending:
    """A transfer that was sent; ``future`` is its result, if a thread does it."""

    def __init__(self, transfer: Transfer, future: Future[None] | None, progress: Progress) -> None:
        self.transfer: Transfer | None = transfer
        self.future = future
        self.progress = progress

    def wait(self) -> Tensor | None:
        """Wait for the transfer, free its memory, and return the tile that it read."""
        if self.future is not None:
            with self.progress.waiting("spill"):
                self.future.result()
        transfer, self.transfer = self.transfer, None
        assert transfer is not None, "a transfer is waited for once"
        found = transfer.result() if transfer.result is not None else None
        transfer.held.clear()
        return found


class Prefetched(Generic[Key]):
    """Prefetched tensors by key, until they are taken."""

    def __init__(self) -> None:
        self.pending: dict[Key, Pending] = {}

    def start(self, key: Key, fetch: Callable[[], Pending]) -> None:
        """Start to fetch, unless a transfer for the key is pending."""
        if key not in self.pending:
            self.pending[key] = fetch()

    def take(self, key: Key, fetch: Callable[[], Pending]) -> Tensor:
        """Return the tensor that was prefetched, or fetch it now."""
        waiting = self.pending.pop(key, None)
        tensor = (fetch() if waiting is None else waiting).wait()
        assert tensor is not None
        return tensor

    def wait(self) -> None:
        """Wait for all pending transfers."""
        while self.pending:
            self.pending.popitem()[1].wait()


class TransferQueue:
    """Runs transfers: those that go ahead in a thread of its own, the others in the caller's.

    Attributes:
        pool: Buffers that the transfers of a tile pass share. Outside a pass, each transfer has its own.
        thread: The thread; None if no segment transfers ahead, or in a rehearsal.
        folder: Folder of maps on the disk.
        progress: Told the time spent waiting.
        make_stand_in: Makes stand-ins for maps on lower tiers in a rehearsal, where no data is moved.
    """

    def __init__(
        self,
        ahead: bool = False,
        folder: str | None = None,
        progress: Progress | None = None,
        make_stand_in: MakeStandIn | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.make_stand_in = make_stand_in
        self.folder = folder
        self.pool = Pool(open=False, fakes=make_stand_in is not None)
        real = ahead and make_stand_in is None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transfers") if real else None

    def send(self, transfer: Transfer, ahead: bool) -> Pending:
        """Do a transfer, or let the thread do it."""
        if self.make_stand_in is not None:  # a rehearsal needs the tensors of the transfer only
            return Pending(transfer, None, self.progress)
        if self.thread is not None and ahead:
            return Pending(transfer, self.thread.submit(transfer.run), self.progress)
        with self.progress.waiting("spill"), profiler_range("transfer"):
            transfer.run()
        return Pending(transfer, None, self.progress)

    @contextmanager
    def open_pool(self) -> Iterator[None]:
        """Open a pool for the duration of a tile pass."""
        former, self.pool = self.pool, Pool(fakes=self.make_stand_in is not None)
        try:
            yield
        finally:
            self.pool.close()
            self.pool = former
