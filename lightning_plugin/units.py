"""Sizes and durations as texts: ``"11GiB"``."""

from __future__ import annotations

import math
import re

UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(size: int | float | str) -> int:
    """Parse a size in bytes from a number or a text such as ``"512MiB"``, ``"11 GiB"`` or ``"1.5e9"``."""
    if isinstance(size, (int, float)):
        count = int(size)
    else:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", size.lower())
        if match is None or match[2] not in UNITS:
            known = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
            raise ValueError(f"{size!r} is not a size; write a number with one of {known}, as in '11GiB'")
        count = int(float(match[1]) * UNITS[match[2]])
    if count <= 0:
        raise ValueError(f"a size must be positive, got {size!r}")
    return count


def format_bytes(count: float) -> str:
    """Format a size with one decimal in the largest unit below it."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes or hours."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def ceil_mib(count: int) -> str:
    """Format a size in MiB, rounded up, so that the text parsed is no smaller than the size."""
    return f"{math.ceil(count / 2**20 * 10) / 10:.1f} MiB"
