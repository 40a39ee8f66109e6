"""Streams and events of a device that is not there: what is launched runs at once, and the order of waits is recorded.

The engine transfers to pinned memory on a stream of its own (`residency.tiers`). Here its streams and events are
`Recorded`, and the device is the processor, so that whole steps run with real numbers; every operator is noted with the
stream that it was launched on and the memory that it reads and writes. Two accesses to the same bytes, of which one
writes, are a *race* if neither is known to be done before the other begins: what a real device may run in any order.
Memory that is let go counts as written to by the stream that it was allocated on, whose next kernel may be given it;
whether the processor's allocator really gives an address twice is chance, so that each tensor's bytes have numbers of
their own.

What is known is a clock for each stream: how far the other streams have come for sure. An event carries the clock of
its stream; who waits for it knows what it knows. What the host waits for is known to all that it launches later, from
any thread: threads hand on what they do through futures, which are not recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_plugin.layout import Layout
from lightning_plugin.residency import tiers, transfer
from lightning_plugin.residency.tiers import HostMemory

MAIN, SIDE = "main", "side"
Clock = dict[str, int]
Bytes = tuple[int, int]


def merged(one: Clock, other: Clock) -> Clock:
    return {s: max(one.get(s, 0), other.get(s, 0)) for s in one.keys() | other.keys()}


@dataclass(frozen=True)
class Access:
    """An operator's: ``known`` is how far each stream had come for sure when it may have begun."""

    operator: str
    stream: str
    number: int
    known: Clock
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]

    def after(self, other: Access) -> bool:
        return self.known.get(other.stream, 0) >= other.number


@dataclass
class Recorder:
    """What was launched; the lock makes an order of it where threads launch at the same time."""

    #: Whose waits are left out, to see that a race is found: "main stream", "side stream" or "host".
    deaf: str = ""
    accesses: list[Access] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)
    host_knows: Clock = field(default_factory=dict)
    here: threading.local = field(default_factory=threading.local)
    lock: Any = field(default_factory=threading.RLock)
    waits: int = 0
    #: The number of the first byte of each memory that is there, by address, and what keeps an eye on it.
    firsts: dict[int, tuple[int, Any]] = field(default_factory=dict)
    bytes_seen: int = 0

    @property
    def stream(self) -> str:
        """The stream on which this thread launches."""
        return getattr(self.here, "stream", MAIN)

    def launch(self, operator: str, reads: list[Bytes], writes: list[Bytes], stream: str | None = None) -> None:
        with self.lock:
            stream = stream or self.stream
            clock = merged(self.clocks.get(stream, {}), self.host_knows)
            number = clock.get(stream, 0) + 1
            self.clocks[stream] = {**clock, stream: number}
            self.accesses.append(Access(operator, stream, number, clock, tuple(reads), tuple(writes)))

    def span_of(self, t: Tensor) -> Bytes | None:
        """The numbers of the bytes between the first element and the last."""
        if not t.numel() or t.layout != torch.strided:
            return None
        first = self.first_of(t.untyped_storage()) + t.storage_offset() * t.element_size()
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return first, first + (last + 1) * t.element_size()

    def first_of(self, storage: torch.UntypedStorage) -> int:
        address = storage.data_ptr()
        if address not in self.firsts:
            first, stream = self.bytes_seen, self.stream
            self.bytes_seen += storage.nbytes()
            span = first, self.bytes_seen

            def gone(_: object) -> None:
                with self.lock:
                    del self.firsts[address]
                    self.launch("let go", [], [span], stream)

            self.firsts[address] = first, weakref.ref(storage, gone)
        return self.firsts[address][0]

    def races(self) -> list[tuple[Access, Access]]:
        """Pairs of accesses to the same bytes in any order."""
        sides = [a for a in self.accesses if a.stream != MAIN]
        others = [a for a in self.accesses if a.stream == MAIN]
        return [(a, b) for a in sides for b in others if not a.after(b) and not b.after(a) and conflict(a, b)]


def conflict(a: Access, b: Access) -> bool:
    return meet(a.writes, b.writes) or meet(a.writes, b.reads) or meet(a.reads, b.writes)


def meet(some: tuple[Bytes, ...], others: tuple[Bytes, ...]) -> bool:
    return any(lo < end and begin < hi for lo, hi in some for begin, end in others)


class Event:
    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.recorder, self.clock = recorder, clock

    def synchronize(self) -> None:
        with self.recorder.lock:
            self.recorder.waits += 1
            if self.recorder.deaf != "host":
                self.recorder.host_knows = merged(self.recorder.host_knows, self.clock)


class Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record_event(self) -> Event:
        with self.recorder.lock:
            known = merged(self.recorder.clocks.get(self.name, {}), self.recorder.host_knows)
            return Event(self.recorder, known)

    def wait_event(self, event: Event) -> None:
        with self.recorder.lock:
            self.recorder.waits += 1
            if self.recorder.deaf != f"{self.name} stream":
                self.recorder.clocks[self.name] = merged(self.recorder.clocks.get(self.name, {}), event.clock)


class Noted(TorchDispatchMode):
    """Notes the memory that operators read and write, in the thread that it was entered in."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = named_tensors(func, args, kwargs)
        with self.recorder.lock:
            out = func(*args, **kwargs)
            if any(isinstance(t, FakeTensor) for t, _ in given):
                return out  # what is recorded, or planned, has no memory
            span_of = self.recorder.span_of
            reads = [span for t, write in given if not write and (span := span_of(t))]
            writes = [span for t, write in given if write and (span := span_of(t))]
            there = {t.untyped_storage().data_ptr() for t, _ in given}
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
            fresh = [t for t in made if t.untyped_storage().data_ptr() not in there]
            if fresh or writes:  # else it is a view, which touches nothing
                writes += [span for t in fresh if (span := span_of(t))]
                self.recorder.launch(str(func), reads, writes)
        return out


def named_tensors(func: Any, args: Any, kwargs: Any) -> list[tuple[Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes to them."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        write = argument.alias_info is not None and argument.alias_info.is_write
        found += [(t, write) for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


@contextmanager
def recorded_device(monkeypatch: Any, deaf: str = "") -> Iterator[Recorder]:
    """Maps on the host behave as below a device with streams; everything in this block is recorded."""
    recorder = Recorder(deaf)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        former = recorder.stream
        recorder.here.stream = stream.name
        try:
            with Noted(recorder):  # also in the thread of transfers, which has no mode of its own
                yield
        finally:
            recorder.here.stream = former

    def launched(device: torch.device) -> Event:
        return Stream(recorder, recorder.stream).record_event()

    class Below(HostMemory):
        """A map as on a device: pinned memory is memory, which the device's kernels reach."""

        def __init__(
            self, layout: Layout, dtype: torch.dtype, device: torch.device, zero: bool = False, numbered: Any = None
        ) -> None:
            super().__init__(layout, dtype, device)
            self.cuda, self.numbered = True, numbered
            if zero:
                self.last = transfer.run_on_transfer_stream(device, self.data.zero_, launched(device))

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "transfer_stream", lambda device: Stream(recorder, SIDE))
        for module in (tiers, transfer):
            patch.setattr(module, "event_after_launched", launched)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(recorder, recorder.stream))
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(tiers, "HostMemory", Below)
        with Noted(recorder):
            yield recorder
