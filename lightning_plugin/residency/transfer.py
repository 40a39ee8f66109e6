"""Moving tiles and copies between the device and a lower tier, at once or beside the work on other tiles.

[Note: ahead] A segment that transfers *ahead* hands what it writes to a thread, and has what its next tile reads
fetched while it computes this one. There is one thread for the maps of a run, first in first out: what is read has been
written, and what is added to has been read. Memory stays bounded and known beforehand: one transfer to a map is under
way at a time, one tile of it is fetched ahead, and what a transfer needs is allocated and let go by the thread that
computes, so that the ledger and a rehearsal count it. A transfer that failed says so at the next one, or at the end of
its segment. Copies of streamed tensors have a transfer queue of their own: they are large, and a tile would wait behind
them. CUDA has a stream for transfers; on any other device work is done where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.progress import Progress, ranged
from lightning_plugin.residency.numbered import Numbered


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


@dataclass(eq=False)
class Transfer:
    """A transfer made ready.

    Attributes:
        held: The tensors that it needs. Whoever waits empties the list, so that they go in the thread that computes.
        run: Does it, in any thread.
        result: The part that was fetched.
        finished: Waits until it is done, where a thread does it.
    """

    held: list[Tensor]
    run: Callable[[], None]
    result: Callable[[], Tensor] | None = None
    finished: Callable[[], None] | None = None

    def wait(self) -> Tensor | None:
        """Wait until it is done, let its memory go, and give what it has fetched."""
        if self.finished is not None:
            self.finished()
        found = self.result() if self.result is not None else None
        self.held.clear()
        return found


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
    """A map on a lower tier; each method makes a transfer ready. ``made`` says which tiles of it are not there, and
    where the same lies."""

    made: Numbered | None

    def sending(self, box: Box, tile: Tensor) -> Transfer: ...

    def fetching(self, box: Box) -> Transfer: ...

    def adding(self, box: Box, tile: Tensor) -> Transfer: ...


#: Makes the stand-in of a map on a lower tier, in a rehearsal.
Stand = Callable[[Layout, torch.dtype, torch.device, str], Any]


class Arrivals(Generic[Key]):
    """Tensors that were fetched ahead, by name, until they are taken."""

    def __init__(self) -> None:
        self.coming: dict[Key, Transfer] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.coming

    def begin(self, key: Key, fetch: Callable[[], Transfer]) -> None:
        """Begin to fetch, unless it is on its way."""
        if key not in self.coming:
            self.coming[key] = fetch()

    def take(self, key: Key, fetch: Callable[[], Transfer]) -> Tensor:
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

    In a rehearsal ``stand`` makes what stands for a map on a lower tier, and nothing is moved. ``folder`` is where maps
    on the disk are kept; ``progress`` hears of waiting.
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
        real = ahead and stand is None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transfers") if real else None

    def send(self, transfer: Transfer, ahead: bool) -> Transfer:
        """Do a transfer, or have it done beside other work. In a rehearsal it only holds its memory."""
        if self.thread is not None and ahead:
            transfer.finished = partial(self.wait, self.thread.submit(transfer.run))
        elif self.stand is None:
            with self.progress.spending("spill"), ranged("transfer"):
                transfer.run()
        return transfer

    def wait(self, future: Future[None]) -> None:
        with self.progress.spending("spill"):
            future.result()
