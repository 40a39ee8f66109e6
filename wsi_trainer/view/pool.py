"""Open things, a bounded number of them: those not used for longest are closed when nobody reads them any more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


Value = TypeVar("Value", bound=Closable)


@dataclass
class _Entry(Generic[Value]):
    """One that is open, or is being opened by whoever holds the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    value: Value | None = None
    users: int = 0


class Pool(Generic[Value]):
    """Opens on demand, each thing once, and keeps the most recently used open.

    Args:
        open_one: Opens the thing with a number.
        limit: How many stay open. More are open only while as many threads read different ones.
    """

    def __init__(self, open_one: Callable[[int], Value], limit: int) -> None:
        self._open_one, self._limit = open_one, limit
        self._entries: OrderedDict[int, _Entry[Value]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def opened(self) -> int:
        """How many are open now."""
        with self._lock:
            return sum(entry.value is not None for entry in self._entries.values())

    @contextmanager
    def lease(self, number: int) -> Iterator[Value]:
        """The open thing, which is not closed inside of the `with`."""
        with self._lock:
            entry = self._entries.setdefault(number, _Entry())
            self._entries.move_to_end(number)
            entry.users += 1
        try:
            with entry.lock:
                if entry.value is None:
                    entry.value = self._open_one(number)
            yield entry.value
        finally:
            with self._lock:
                entry.users -= 1
                closing = self._superfluous()
            for value in closing:
                value.close()

    def _superfluous(self) -> list[Value]:
        """Those to close, taken out of the pool: that could not be opened, or are more than the limit."""
        idle = [number for number, entry in self._entries.items() if entry.users == 0]
        broken = [number for number in idle if self._entries[number].value is None]
        kept = [number for number in idle if self._entries[number].value is not None]
        count = len(self._entries) - len(broken) - self._limit
        closed = [self._entries.pop(number).value for number in [*broken, *kept[: max(0, count)]]]
        return [value for value in closed if value is not None]

    def close(self) -> None:
        """Close all that nobody reads."""
        with self._lock:
            idle = [number for number, entry in self._entries.items() if entry.users == 0]
            values = [self._entries.pop(number).value for number in idle]
        for value in values:
            if value is not None:
                value.close()
