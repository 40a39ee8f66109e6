"""The budget where the user gave none: what the device has."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: The part of a device's free memory that is left to what no ledger sees: the context, fragments, other
#: libraries.
SPARE = 0.1

CGROUP = Path("/sys/fs/cgroup/memory.max")


def default_budget(device: torch.device) -> int:
    """What a step may use: nearly all that is free on an accelerator, half of a machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - SPARE))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * (1 - SPARE))
    return machine_memory() // 2


def machine_memory() -> int:
    """The memory this process may use: the machine's, or its control group's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    return min(total, int(limit)) if limit.isdigit() else total
