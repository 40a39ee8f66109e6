"""Prompt shutdown on SIGINT, SIGTERM, SIGHUP, and when the parent process dies.

All work is kept in such a way that a process may die at any moment. So on a signal the command unwinds, and where a
library does not return in time the process ends without it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from types import FrameType
from typing import NoReturn

GRACE = 0.7
"""Seconds in which a command may unwind."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """As shells have it: 130 for Ctrl-C, 143 for `kill`."""
        return 128 + self.signum

    def __str__(self) -> str:
        return "interrupted" if self.signum == signal.SIGINT else f"ended by {signal.Signals(self.signum).name}"


@contextmanager
def ends_at_once(grace: float = GRACE) -> Iterator[None]:
    """In this context signals raise `Stopped`, and end the process and its children soon after in any case.

    Args:
        grace: Seconds until then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # as nohup has it
    reading, writing = socket.socketpair()  # Windows has pipes that do not block from Python 3.12 on
    writing.setblocking(False)
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reading, frozenset(before), grace), daemon=True)
    watcher.start()
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        stopped = sys.exc_info()[0] is Stopped
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, _again if stopped and handler is _raise else handler)
        writing.close()  # the watcher ends, unless it is ending the process
        watcher.join(0 if stopped else None)


@contextmanager
def stops_once() -> Iterator[None]:
    """In this context Ctrl-C and SIGTERM raise `Stopped`; more of them does not break off how that is told. What
    somebody else handles, or the parent is to see, is left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    for number in {signum, signal.SIGINT, signal.SIGTERM}:
        signal.signal(number, _again)
    raise Stopped(signum)


def _again(signum: int, frame: FrameType | None) -> None:
    """A further signal changes nothing: the process unwinds, and raising once more would only break that off."""


def _watch(reading: socket.socket, caught: frozenset[int], grace: float) -> None:
    """Ends the process some time after a signal: its main thread may be deep in a library."""
    while received := reading.recv(1):
        if received[0] in caught:
            time.sleep(grace)
            with suppress(OSError, ValueError):
                print(f"wsi-train: {Stopped(received[0])}", file=sys.stderr, flush=True)
            end_children()
            os._exit(128 + received[0])
    reading.close()


def end_children(since: frozenset[multiprocessing.process.BaseProcess] = frozenset()) -> None:
    """Kill the processes that this one started, but those of `since`."""
    for child in multiprocessing.active_children():
        if child not in since:
            child.kill()


def end_with_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when that is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        try:
            threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
        except RuntimeError:  # the system gives no thread: a worker that might outlive its parent does not begin
            os._exit(1)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
