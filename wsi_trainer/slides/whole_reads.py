"""Reads by position that are not cut short.

The system may give fewer bytes than were asked for, of a regular file too: where a signal interrupts a network file
system, and of more than 2 GiB at a time. Whatever is missing is asked for again; only the end of the file ends a read.
"""

from __future__ import annotations

import os
from typing import Any


def read_into(fd: int, room: Any, offset: int) -> int:
    """Fills memory from a place in a file; how many bytes there were, fewer only where the file ends."""
    view, done = memoryview(room), 0
    while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return done


def read_at(fd: int, count: int, offset: int) -> bytes:
    """So many bytes from a place in a file, fewer only where the file ends."""
    data = os.pread(fd, count, offset)
    if len(data) == count or not data:
        return data
    return data + read_at(fd, count - len(data), offset + len(data))
