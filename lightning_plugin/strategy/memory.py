"""What the device has, which is the budget where the user gave none, and what optimizers will take of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_plugin.private import forget_step_hooks, tree_leaves

#: The part of a device's free memory that is left to what no ledger sees: the context, fragments, other
#: libraries.
SPARE = 0.1

log = logging.getLogger(__name__)

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


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer will hold on the device once it has made a step."""
    return max(held_bytes(optimizer), sum(group_bytes(optimizer, group) for group in optimizer.param_groups))


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer holds now, beside single numbers such as counts of steps."""
    tensors = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor) and t.dim()]
    return sum(t.numel() * t.element_size() for t in tensors)


def group_bytes(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    """The state of a group, found by a step of PyTorch's own class on parameters without data. The user's own code is
    not run: a step is called once a step. An optimizer that is not PyTorch's, or needs data for its step, is taken to
    hold two numbers for each parameter, as Adam does, until it has made a step."""
    parameters = [p for p in group["params"] if p.requires_grad]  # type: ignore[attr-defined]
    own: Any = next(
        (c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")), torch.optim.Optimizer
    )
    twin: Any = torch.optim.Optimizer.__new__(own)
    twins = [torch.empty_like(p, device="meta").requires_grad_() for p in parameters]
    for t in twins:
        t.grad = torch.empty_like(t)
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": twins, "fused": False}]
    forget_step_hooks(twin)  # the user's are for real steps
    try:
        own.step(twin)
    except Exception as error:  # whatever an optimizer may not do without data
        log.debug("%s does not step without data: %s", type(optimizer).__name__, error)
        return 2 * sum(p.numel() * p.element_size() for p in parameters)
    tensors = [t for t in tree_leaves(dict(twin.state)) if isinstance(t, Tensor) and t.is_meta]
    return sum(t.numel() * t.element_size() for t in tensors if not any(t is p for p in twins))
