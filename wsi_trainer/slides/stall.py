"""Noticing a slide that makes no progress: a file on a network that is gone, a decoder that never ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from wsi_trainer.errors import UserError

_STALL = 30 * 60.0  # seconds


def stall_seconds(minutes: float | None) -> float | None:
    """After how many seconds a slide is given up that makes no progress; None for never."""
    if minutes is None:
        return _STALL
    if not 0 <= minutes < float("inf"):
        raise UserError(f"--stall_minutes {minutes:g}: expected minutes, or 0 to wait for ever")
    return minutes * 60 or None


class StallWatch:
    """Remembers when each job last made progress."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._seen: dict[int, tuple[int, float]] = {}

    def is_stalled(self, number: int, done: int) -> bool:
        """Whether a job that is being worked on has been at this count for too long."""
        now = time.monotonic()
        before, since = self._seen.get(number, (-1, now))
        if done != before:
            self._seen[number] = (done, now)
            return False
        return self._seconds is not None and now - since > self._seconds

    def reason(self, pid: int, share: float) -> str:
        """Why a job is given up, as far as the system tells what its process does."""
        minutes = (self._seconds or 0) / 60
        return f"no progress for {minutes:g} minutes, at {share:.0%} of the slide: {_doing(pid)}"


def _doing(pid: int) -> str:
    """What a process is at: on Linux from the states of its threads."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(stat.read_text().rpartition(")")[2].split()[0])
        except OSError:  # the thread has just ended
            continue
    if "D" in states:
        return "it waits for the disk or the network that the slide lies on"
    if "R" in states:
        return "its reader computes without an end; the file may be damaged"
    if not states:
        return "this system does not tell what its reader waits for"
    return "its reader waits, perhaps for the network that the slide lies on, or for a lock"


def end(pid: int) -> None:
    """Ends a worker process at once: one that hangs in a reader's C code listens to nothing else."""
    try:
        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends a process with either
    except ProcessLookupError:
        return  # it ended by itself meanwhile
