"""Budgets: the default one of a device, and the part of a budget that plans leave free. Freed memory of the process.

[Note: heap] On a CPU a budget counts live tensors, but a cluster kills a job by the memory of its process. The two
differ by *holes*: freed blocks of up to 32 MiB, which glibc keeps and splits, soon as much as the budget again.
Returning each block to the system when it is freed (`MALLOC_MMAP_THRESHOLD_`) makes a step a third slower, since each
allocation is then a system call. Therefore the process is measured between tiles, and within a tile that the ledger
watches whenever much was freed; if there are too many holes, all are returned at once. Memory that could not be
returned, or that belongs to other libraries, counts as the process's own from then on.

A process may grow by the budget, `HOLE_SHARE` of it, and `HOLE_BYTES`. Python itself grows by some 60 MiB
(`PYTHON_BYTES`) in planning and running a first step; the rest may be holes. All memory that is freed between two
measurements may become holes, so half of them may be left after a measurement, and half may be freed until the next.
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

#: Part of an accelerator's free memory that the ledger does not count: the context, fragments, other libraries.
UNCOUNTED_SHARE = 0.1

#: The folder of control groups that limit memory, and the name of the limit's file, by version of control groups.
GROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    2: ("sys/fs/cgroup", "memory.max"),
}


def default_budget(device: torch.device) -> int:
    """Return the budget of a step in bytes: most of an accelerator's free memory, half of the machine's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - UNCOUNTED_SHARE))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * (1 - UNCOUNTED_SHARE))
    return machine_memory() // 2


def machine_memory() -> int:
    """Return the memory that this process may use: the machine's, or the limit of its control group if that is less."""
    return min(total_memory(), group_limit() or total_memory())


def total_memory() -> int:
    """Return the memory of the machine."""
    return int(psutil.virtual_memory().total)


def group_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest limit of the control groups that this process is in; None if there is no limit.

    Control groups are nested (by SLURM, by systemd), and a group is bound by its parents' limits too. Versions 1 and 2
    are supported; a system without control groups has no such files.

    Args:
        root: Root of the file system, for tests.
    """
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and number != "0":
            continue
        top, name = root / GROUPS[version][0], GROUPS[version][1]
        folder = _group_folder(top, path)
        while True:
            limits += [int(text) for text in _lines(folder / name)[:1] if text.isdigit()]
            if folder == top:
                break
            folder = folder.parent
    return min(limits, default=None)


def _group_folder(top: Path, group: str) -> Path:
    """Return the folder of a control group. In a container, the container's own group may be mounted as the top."""
    parts = [] if ".." in group.split("/") else group.strip("/").split("/")
    first = next((i for i, part in enumerate(parts) if (top / part).is_dir()), len(parts))
    return top.joinpath(*parts[first:])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


#: Part of a budget that plans leave free: a rehearsal skips tiles, whose sizes may differ by a rounding.
FREE_SHARE = 0.01
#: Bytes of a budget that plans leave free: numbers that the user's code keeps, such as losses.
RESERVE = 1024


def usable(budget: int) -> int:
    """Return the bytes of a budget that a plan may use."""
    return int(budget * (1 - FREE_SHARE)) - RESERVE


def budget_for(peak: int) -> int:
    """Return the smallest budget for a plan with this peak."""
    return math.ceil((peak + RESERVE) / (1 - FREE_SHARE)) + 1


HOLE_SHARE, HOLE_BYTES, PYTHON_BYTES = 0.15, 64 * 2**20, 64 * 2**20
#: Bytes of holes that are never returned.
MIN_HOLE_BYTES = 16 * 2**20

STATM = Path("/proc/self/statm")


@cache
def malloc_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's ``malloc_trim``; None on a system without it or without ``/proc``."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None


def process_memory() -> int:
    """Return the resident bytes of the process, without mapped files."""
    _, pages, shared, *_ = map(int, STATM.read_text().split())
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False)
class Heap:
    """Memory of the process beside live tensors; see [Note: heap].

    Attributes:
        budget: The budget of a step.
        baseline: Bytes of the process without tensors and holes; None before the first measurement.
        freed: Bytes freed since the last measurement.
    """

    budget: int
    baseline: int | None = None
    freed: int = 0

    @property
    def max_holes(self) -> int:
        """Bytes of holes that may be left after a measurement, and bytes that may be freed until the next one."""
        return max(MIN_HOLE_BYTES, int(HOLE_SHARE * self.budget) + HOLE_BYTES - PYTHON_BYTES) // 2

    @property
    def is_due(self) -> bool:
        """True if there may be too many holes, by the bytes that were freed."""
        return self.freed > self.max_holes

    def trim(self, live: int) -> None:
        """Measure the process, and return its holes to the system if there are too many; ``live`` is the tensors'
        bytes."""
        self.freed = 0
        trim = malloc_trim()
        if trim is None:
            return
        beside = process_memory() - live
        if self.baseline is None or beside > self.baseline + self.max_holes:
            trim(0)
            beside = self.baseline = process_memory() - live
        self.baseline = min(self.baseline, beside)
