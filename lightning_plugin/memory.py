"""Budgets: what a device has, which is the budget where the user gave none, and what a plan leaves free of one.

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
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

#: The part of a device's free memory that is left to what no ledger sees: the context, fragments, other
#: libraries.
UNSEEN = 0.1

#: The folder of control groups that limit memory, and the file of a limit, by their version.
GROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    2: ("sys/fs/cgroup", "memory.max"),
}


def default_budget(device: torch.device) -> int:
    """The bytes that a step may use: nearly all that is free on an accelerator, half of a machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - UNSEEN))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * (1 - UNSEEN))
    return machine_memory() // 2


def machine_memory() -> int:
    """The memory this process may use: the machine's, or its control group's where that is less."""
    return min(total_memory(), group_limit() or total_memory())


def total_memory() -> int:
    """The memory of the machine."""
    return int(psutil.virtual_memory().total)


def group_limit(root: Path = Path("/")) -> int | None:
    """The least limit of the control groups that this process is in, or None where there is none.

    A group is bound by those around it, and SLURM and systemd nest them: the process's own may have no limit while one
    above it has. Both versions of control groups are looked at; a system without them has no such files.

    Args:
        root: Where the file system begins, for tests.
    """
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and number != "0":
            continue
        top, name = root / GROUPS[version][0], GROUPS[version][1]
        place = _seen_below(top, path)
        while True:
            limits += [int(text) for text in _lines(place / name)[:1] if text.isdigit()]
            if place == top:
                break
            place = place.parent
    return min(limits, default=None)


def _seen_below(top: Path, group: str) -> Path:
    """The folder of a group. A container may see only its own groups, and its outermost one as the top."""
    parts = [] if ".." in group.split("/") else group.strip("/").split("/")
    first = next((i for i, part in enumerate(parts) if (top / part).is_dir()), len(parts))
    return top.joinpath(*parts[first:])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


#: This part of a budget is left free: a step's last bytes depend on rounding in places that a rehearsal skips.
UNPLANNED = 0.01
#: And this many bytes: single numbers that the user's own code holds beside the network, such as losses.
RESERVE = 1024


def usable(budget: int) -> int:
    """Bytes of a budget that a plan may use."""
    return int(budget * (1 - UNPLANNED)) - RESERVE


def budget_for(peak: int) -> int:
    """The smallest budget of which so much may be used."""
    return math.ceil((peak + RESERVE) / (1 - UNPLANNED)) + 1


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
        """True if so much was freed that there may be too many holes."""
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
