"""What the device has, which is the budget where the user gave none, and what optimizers will take of it."""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict, defaultdict
from pathlib import Path

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
    return sum(group_bytes(optimizer, group) for group in optimizer.param_groups)


def group_bytes(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    """The state of a group, found by a step on parameters without data; an optimizer that needs data for its step is
    taken to hold two numbers for each parameter, as Adam does."""
    parameters = [p for p in group["params"] if p.requires_grad]  # type: ignore[attr-defined]
    twins = [torch.empty_like(p, device="meta").requires_grad_() for p in parameters]
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    twin_optimizer = copy.copy(optimizer)
    twin_optimizer.state = defaultdict(dict)
    twin_optimizer.param_groups = [{**group, "params": twins, "fused": False}]
    twin_optimizer._optimizer_step_pre_hooks = OrderedDict()  # the user's hooks are for real steps
    twin_optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        type(optimizer).step(twin_optimizer)
    except Exception as error:  # whatever an optimizer that is not PyTorch's may not do without data
        log.debug("%s does not step without data: %s", type(optimizer).__name__, error)
        return 2 * sum(p.numel() * p.element_size() for p in parameters)
    tensors = [t for t in tree_leaves(dict(twin_optimizer.state)) if isinstance(t, Tensor) and t.is_meta]
    return sum(t.numel() * t.element_size() for t in tensors if not any(t is p for p in twins))
