"""Moving tiles and copies between the device and a lower tier, at once or beside the work on other tiles.

[Note: ahead] A segment that transfers *ahead* hands what it writes to a thread, and has what its next tile reads
fetched while it computes this one. There is one thread for the maps of a run, first in first out: what is read has been
written, and what is added to has been read. Memory stays bounded and known beforehand: one transfer to a map is under
way at a time, one tile of it is fetched ahead, and whatever a transfer needs is borrowed by the thread that computes,
so that the ledger and a rehearsal count it; see [Note: pool]. A transfer that failed says so at the next one, or at the
end of its segment. Copies of streamed tensors have a transfer queue of their own: they are large, and a tile would wait
behind them. CUDA has a stream for transfers; on any other device work is done where it is asked for.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Numbered
from lightning_plugin.layout import Layout
from lightning_plugin.progress import Progress, profiler_range

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


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's transfers run."""
    return torch.cuda.Stream(device)


def launched(device: torch.device) -> torch.cuda.Event | None:
    """All that was launched on a device until now: a transfer has to wait for it before it may touch its tile."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def beside(device: torch.device, work: Callable[[], object], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Do work beside a device's kernels, after those that are to be ready; the event is when it is done."""
    if ready is None:
        work()
        return None
    side = side_stream(device)
    with torch.cuda.stream(side):
        side.wait_event(ready)
        work()
        return side.record_event()


def after(device: torch.device, done: torch.cuda.Event | None) -> None:
    """Have a device's next kernels wait for work that goes on beside them."""
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)


Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer made ready: ``run`` does it, in any thread, and ``result`` is the part that was fetched.

    Tensors are reached through ``held`` alone: emptied by the thread that computes, it lets them go there.
    """

    held: list[Tensor]
    run: Callable[[], None]
    result: Callable[[], Tensor] | None = None


def arriving(
    room: Tensor, work: Callable[[Tensor], object], last: Callable[[torch.cuda.Event | None], None] | None = None
) -> Transfer:
    """A transfer into room on the device; the room may have been another tensor's until now, whose kernels come first.
    ``last`` hears of the event at whose time it is done."""
    device, held, ready = room.device, [room], launched(room.device)
    done: list[torch.cuda.Event | None] = []

    def run() -> None:
        done.append(beside(device, lambda: work(held[0]), ready))
        if last is not None:
            last(done[0])

    def result() -> Tensor:
        after(device, done[0] if done else None)
        return held[0]

    return Transfer(held, run, result)


class Lower(Protocol):
    """A map on a lower tier; each method makes a transfer ready, in buffers that it borrows. ``made`` says which tiles
    of it are not there, and where the same lies."""

    made: Numbered | None

    def sending(self, box: Box, tile: Tensor, lend: Lend) -> Transfer: ...

    def fetching(self, box: Box, lend: Lend) -> Transfer: ...

    def adding(self, box: Box, tile: Tensor, lend: Lend) -> Transfer: ...


#: Makes the stand-in of a map on a lower tier, in a rehearsal.
Stand = Callable[[Layout, torch.dtype, torch.device, str], Any]


class Pending:
    """A transfer that was handed over."""

    def __init__(self, transfer: Transfer, future: Future[None] | None, progress: Progress) -> None:
        self.transfer: Transfer | None = transfer
        self.future = future
        self.progress = progress

    def wait(self) -> Tensor | None:
        """Wait until it is done, let its memory go, and give what it has fetched."""
        if self.future is not None:
            with self.progress.waiting("spill"):
                self.future.result()
        transfer, self.transfer = self.transfer, None
        assert transfer is not None, "a transfer is waited for once"
        found = transfer.result() if transfer.result is not None else None
        transfer.held.clear()
        return found


class Arrivals(Generic[Key]):
    """Tensors that were fetched ahead, by name, until they are taken."""

    def __init__(self) -> None:
        self.coming: dict[Key, Pending] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.coming

    def begin(self, key: Key, fetch: Callable[[], Pending]) -> None:
        """Begin to fetch, unless it is on its way."""
        if key not in self.coming:
            self.coming[key] = fetch()

    def take(self, key: Key, fetch: Callable[[], Pending]) -> Tensor:
        """The tensor that was fetched, or is fetched now."""
        waiting = self.coming.pop(key, None)
        tensor = (fetch() if waiting is None else waiting).wait()
        assert tensor is not None
        return tensor

    def rest(self) -> None:
        """Nothing is on its way any more."""
        while self.coming:
            self.coming.popitem()[1].wait()


class TransferQueue:
    """Runs transfers: in a thread, where some go ``ahead``, else in the caller's.

    While a segment passes over its tiles they share a ``pool`` of buffers; otherwise each has its own. In a rehearsal
    ``stand`` makes what stands for a map on a lower tier, and nothing is moved. ``folder`` is where maps on the disk
    are kept; ``progress`` hears of waiting.
    """

    def __init__(
        self,
        ahead: bool = False,
        folder: str | None = None,
        progress: Progress | None = None,
        stand: Stand | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.stand = stand
        self.folder = folder
        self.pool = Pool(open=False, fakes=stand is not None)
        real = ahead and stand is None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transfers") if real else None

    def send(self, transfer: Transfer, ahead: bool) -> Pending:
        """Do a transfer, or have it done beside other work."""
        if self.stand is not None:  # only what the transfer holds is asked for
            return Pending(transfer, None, self.progress)
        if self.thread is not None and ahead:
            return Pending(transfer, self.thread.submit(transfer.run), self.progress)
        with self.progress.waiting("spill"), profiler_range("transfer"):
            transfer.run()
        return Pending(transfer, None, self.progress)

    @contextmanager
    def pooling(self) -> Iterator[None]:
        """A pass over a segment's tiles."""
        former, self.pool = self.pool, Pool(fakes=self.stand is not None)
        try:
            yield
        finally:
            self.pool.close()
            self.pool = former
