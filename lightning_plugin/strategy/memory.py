"""What the device has, which is the budget where the user gave none, and what optimizers will take of it."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

#: The part of a device's free memory that is left to what no ledger sees: the context, fragments, other
#: libraries.
SPARE = 0.1

log = logging.getLogger(__name__)

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
    twin._optimizer_step_pre_hooks = OrderedDict()  # the user's hooks are for real steps
    twin._optimizer_step_post_hooks = OrderedDict()
    try:
        own.step(twin)
    except Exception as error:  # whatever an optimizer may not do without data
        log.debug("%s does not step without data: %s", type(optimizer).__name__, error)
        return 2 * sum(p.numel() * p.element_size() for p in parameters)
    tensors = [t for t in tree_leaves(dict(twin.state)) if isinstance(t, Tensor) and t.is_meta]
    return sum(t.numel() * t.element_size() for t in tensors if not any(t is p for p in twins))
