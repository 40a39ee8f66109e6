"""The kinds of faults: which calls, what is done at the n-th of them, and for how many calls."""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.seam import FROM_THEN_ON

FILES = ("open", "make", "read", "write", "change", "close")
WRITES = ("make", "write", "change", "close")


@dataclass(frozen=True)
class Kind:
    """A fault. ``once``: it has one place only, the first call."""

    calls: tuple[str, ...]
    action: str
    value: int = 0
    times: int = 1
    once: bool = False
    ends: bool = False  # a process may end without a word


KINDS: Mapping[str, Kind] = {
    "EIO once": Kind((*FILES, "look"), "error", errno.EIO),
    "EIO from then on": Kind(FILES, "error", errno.EIO, FROM_THEN_ON),
    "disk full once": Kind(WRITES, "error", errno.ENOSPC),
    "disk full from then on": Kind(WRITES, "error", errno.ENOSPC, FROM_THEN_ON),
    "EINTR": Kind(("open", "make", "read", "write"), "error", errno.EINTR),
    "too many open files once": Kind(("open", "make"), "error", errno.EMFILE),
    "too many open files from then on": Kind(("open", "make"), "error", errno.EMFILE, FROM_THEN_ON),
    "short read": Kind(("read",), "short"),
    "short write": Kind(("write",), "short"),
    "short reads and writes, all": Kind(("read", "write"), "short", 0, FROM_THEN_ON, once=True),
    "slow disk": Kind((*FILES, "look"), "slow", 1000, FROM_THEN_ON, once=True),
    "no locks": Kind(("lock",), "error", errno.ENOLCK, FROM_THEN_ON),
    # NumPy crashes where it cannot have a buffer of its own to convert numbers in: an end like that by the system.
    "no memory once": Kind(("memory", "map"), "error", errno.ENOMEM, ends=True),
    "no memory from then on": Kind(("memory", "map"), "error", errno.ENOMEM, FROM_THEN_ON, ends=True),
    "no process or thread once": Kind(("start",), "error", errno.EAGAIN),
    "no process or thread from then on": Kind(("start",), "error", errno.EAGAIN, FROM_THEN_ON),
    "SIGKILL": Kind(FILES, "signal self", signal.SIGKILL, ends=True),
    "SIGSEGV while reading": Kind(("read",), "signal self", signal.SIGSEGV, ends=True),
    "SIGTERM": Kind(FILES, "signal main", signal.SIGTERM, ends=True),
    "SIGINT twice": Kind(FILES, "signal group", signal.SIGINT, 2, ends=True),
    "clock a day back": Kind(FILES, "clock", -86400),
    "clock ten years ahead": Kind(FILES, "clock", 315360000),
    "two runs": Kind(WRITES, "pause", 1),
}
#: A decoder that never ends, where one has a process of its own.
HANGS = Kind(("read",), "hang")
#: Results in a folder that cannot be written to: below it, from the first call on.
READ_ONLY = Kind(("make", "write", "change"), "error", errno.EROFS, FROM_THEN_ON, once=True)
