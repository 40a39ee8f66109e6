"""Bytes and seconds for people, and the memory of the process."""

from __future__ import annotations

import sys

import psutil


def process_peak() -> int:
    """The most resident memory this process has had, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_bytes(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the loop ends at TiB")


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
