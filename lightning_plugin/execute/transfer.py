"""Moving tiles between the device and a lower tier, at once or beside the work on other tiles.

[Note: ahead] A segment that transfers *ahead* hands what it writes to a thread, and has what its next tile reads
fetched while it computes this one. There is one thread for a run, first in first out: what is read has been written,
and what is added to has been read. Memory stays bounded and known beforehand: one transfer to a map is under way at a
time, one tile of it is fetched ahead, and whatever a transfer needs is borrowed by the thread that computes, so that
the ledger and a rehearsal count it; see [Note: pool] in `pool`. A transfer that failed says so at the next one, or at
the end of its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.pool import Lender, Pool
from lightning_plugin.execute.rehearsal import Rehearsal
from lightning_plugin.progress import Progress


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer made ready: ``run`` does it, in any thread, and ``result`` is the tile that was fetched.

    Tensors are reached through ``held`` alone: emptied by the thread that computes, it lets them go there.
    """

    held: list[Tensor]
    run: Callable[[], None]
    result: Callable[[], Tensor] | None = None


class Lower(Protocol):
    """A map on a lower tier; each method makes a transfer ready, in buffers that it borrows."""

    def sending(self, box: Box, tile: Tensor, lender: Lender) -> Transfer: ...

    def fetching(self, box: Box, lender: Lender) -> Transfer: ...

    def adding(self, box: Box, tile: Tensor, lender: Lender) -> Transfer: ...


@dataclass(frozen=True, eq=False)
class Pending:
    """A transfer that was handed over."""

    transfer: Transfer
    future: Future[None] | None
    progress: Progress

    def wait(self) -> Tensor | None:
        """Wait until it is done, let its memory go, and give what it has fetched."""
        if self.future is not None:
            with self.progress.spending("spill"):
                self.future.result()
        found = self.transfer.result() if self.transfer.result is not None else None
        self.transfer.held.clear()
        return found


class Courier:
    """Who does a run's transfers: a thread, where some segment transfers ahead, else whoever asks.

    While a segment passes over its tiles they share a ``pool`` of buffers; otherwise each has its own. ``rehearsal``
    is what the run is, if it is one; ``folder`` is where maps on the disk are kept; ``progress`` hears of waiting.
    """

    def __init__(
        self,
        ahead: bool = False,
        rehearsal: Rehearsal | None = None,
        folder: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.rehearsal = rehearsal
        self.folder = folder
        self.pool = self.new_pool(open=False)
        real = ahead and rehearsal is None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transfers") if real else None

    def new_pool(self, open: bool = True) -> Pool:
        return Pool(open, fakes=self.rehearsal is not None)

    def send(self, transfer: Transfer, ahead: bool) -> Pending:
        """Do a transfer, or have it done beside other work."""
        if self.rehearsal is not None:  # only what the transfer holds is asked for
            return Pending(transfer, None, self.progress)
        if self.thread is not None and ahead:
            return Pending(transfer, self.thread.submit(transfer.run), self.progress)
        with self.progress.spending("spill"):
            transfer.run()
        return Pending(transfer, None, self.progress)

    @contextmanager
    def pooling(self) -> Iterator[None]:
        """A pass over a segment's tiles."""
        former, self.pool = self.pool, self.new_pool()
        try:
            yield
        finally:
            self.pool.close()
            self.pool = former


class Lane:
    """The transfers of one map; see [Note: ahead]. ``largest`` are the positions of its largest tile in this pass."""

    def __init__(self, there: Lower, courier: Courier) -> None:
        self.largest = 0
        self.there = there
        self.courier = courier
        self.sent: Pending | None = None
        self.fetched: dict[Box, Pending] = {}

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.courier.send(self.there.sending(box, tile, self.lender(box)), ahead)
        if not ahead:
            self.settle()

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.courier.send(self.there.adding(box, tile, self.lender(box)), ahead)
        if not ahead:
            self.settle()

    def fetch(self, box: Box) -> None:
        """Begin to read a box that will be asked for."""
        if box not in self.fetched:
            self.fetched[box] = self.fetching(box, ahead=True)

    def fetching(self, box: Box, ahead: bool) -> Pending:
        return self.courier.send(self.there.fetching(box, self.lender(box)), ahead)

    def read(self, box: Box) -> Tensor:
        """A box, which was fetched, or is read now: after what is on its way there."""
        waiting = self.fetched.pop(box, None)
        if waiting is None:
            waiting = self.fetching(box, ahead=self.sent is not None)
        tile = waiting.wait()
        assert tile is not None
        return tile

    def lender(self, box: Box) -> Lender:
        pool = self.courier.pool
        return Lender(pool, box, self.largest if pool.open else 0)

    def expect(self, largest: int) -> None:
        self.largest = largest

    def settle(self) -> None:
        """Wait for what is on its way there."""
        if self.sent is not None:
            sent, self.sent = self.sent, None
            sent.wait()

    def rest(self) -> None:
        """Nothing is on its way in either direction."""
        self.settle()
        while self.fetched:
            self.fetched.popitem()[1].wait()
