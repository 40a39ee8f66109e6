"""The thread that hands jobs to a pool's processes. Where it dies, Python does not notice, and waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager


class Serving:
    """The threads that were begun since a pool was made: its own. They may be gone before anybody sees them."""

    def __init__(self) -> None:
        self._before = frozenset(threading.enumerate())

    def mine(self, thread: threading.Thread | None) -> bool:
        return thread is not None and thread not in self._before

    def check(self) -> None:
        """Raise what a pool raises that has lost a process, if nobody serves this one, which has jobs."""
        if not any(map(self.mine, threading.enumerate())):
            raise BrokenProcessPool("the pool's own thread has died")


@contextmanager
def serving() -> Iterator[Serving]:
    """A context in which a pool is made and used. A thread of it that dies is told of by `check`, and not by Python."""
    found, before = Serving(), threading.excepthook

    def heard(about: threading.ExceptHookArgs) -> None:
        if not found.mine(about.thread):
            before(about)

    threading.excepthook = heard
    try:
        yield found
    finally:
        threading.excepthook = before
