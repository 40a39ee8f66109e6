"""What the device has, which is the budget where the user gave none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

#: The part of a device's free memory that is left to what no ledger sees: the context, fragments, other
#: libraries.
SPARE = 0.1

#: The files that hold a control group's limit, by the kind of file system that the group is in.
LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def default_budget(device: torch.device) -> int:
    """What a step may use: nearly all that is free on an accelerator, half of a machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - SPARE))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * (1 - SPARE))
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
    limits = [_read_limit(file) for file in _limit_files(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """The files with the limits of all groups that hold this process, from its own up to the one that is mounted."""
    groups = _groups(root)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind not in LIMITS or len(before.split()) < 5 or kind not in groups:
            continue
        if kind == "cgroup" and "memory" not in options.split()[-1].split(","):
            continue  # a hierarchy of another resource
        _, _, _, mounted, place = before.split()[:5]
        top = root / place.lstrip("/")
        inside = _below(groups[kind], mounted)
        folder = top / inside
        while True:
            yield folder / LIMITS[kind]
            if folder == top:
                break
            folder = folder.parent


def _groups(root: Path) -> dict[str, str]:
    """The process's own groups, by the kind of file system that they are in."""
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    return found


def _below(group: str, mounted: str) -> str:
    """The place of a group below the one that is mounted; a container may see only its own."""
    if mounted != "/" and not f"{group}/".startswith(f"{mounted}/"):
        return ""
    inside = group.removeprefix(mounted).strip("/")
    return "" if ".." in inside.split("/") else inside


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_limit(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None
