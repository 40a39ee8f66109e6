"""What the C library keeps of freed memory.

[Note: heap] On a CPU a budget counts live tensors, and a cluster kills by what a process has. The two differ by
*holes*: freed blocks of up to 32 MiB, which glibc keeps and cuts into pieces, soon as much as the budget again. Giving
each block back when it is freed (`MALLOC_MMAP_THRESHOLD_`) makes a step a third slower, since all memory is then asked
for anew. So the process is looked at between tiles, and within those that a ledger watches whenever much was freed; and
the holes are given back all at once when there are too many. What cannot be given back, or is somebody else's, is taken
for the process's own size from then on, and not tried for again.

A process is to grow by no more than the budget, `SHARE` of it, and `SLACK`. Python itself grows by some 60 MiB in
planning and running a first step; the rest may be holes. Between two looks as much as was freed may become holes, so
half of them may be there after one, and half may be freed until the next.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHARE, SLACK, PYTHON = 0.15, 64 * 2**20, 64 * 2**20
#: Bytes of holes that any process may have.
FEWEST = 16 * 2**20

STATM = Path("/proc/self/statm")


@cache
def trimmer() -> ctypes._NamedFuncPointer | None:
    """The function of the C library that gives free memory back, where it has one and the process can be looked at."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None


def process_memory() -> int:
    """The bytes of the process that are in memory, without files that are mapped."""
    _, pages, shared, *_ = map(int, STATM.read_text().split())
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False)
class Heap:
    """The memory of a process beside what a ledger counts under a budget: ``beside`` is how much it is without holes,
    ``freed`` what was freed since it was looked at."""

    budget: int
    beside: int | None = None
    freed: int = 0

    @property
    def most(self) -> int:
        """The bytes of holes that the process may keep, and that may be freed before it is looked at again."""
        return max(FEWEST, int(SHARE * self.budget) + SLACK - PYTHON) // 2

    @property
    def due(self) -> bool:
        """Whether so much was freed that there may be too many holes."""
        return self.freed > self.most

    def settle(self, live: int) -> None:
        """Give holes back if there are too many, where tensors of so many bytes are live."""
        self.freed = 0
        trim = trimmer()
        if trim is None:
            return
        beside = process_memory() - live
        if self.beside is None or beside > self.beside + self.most:
            trim(0)
            beside = self.beside = process_memory() - live
        self.beside = min(self.beside, beside)
