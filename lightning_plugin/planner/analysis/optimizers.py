"""The optimizer's state for each parameter, in bytes, found without making a step on it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.private import is_defined_in_torch, step_wrappers, tree_leaves

log = logging.getLogger(__name__)


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Bytes of state that an optimizer has after its first step, for each of its parameters by identity."""
    found: dict[int, int] = {}
    for group in optimizer.param_groups:
        found |= state_of_group(optimizer, group)
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that an optimizer has after its first step."""
    return max(held_bytes(optimizer), sum(state_of(optimizer).values()))


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that an optimizer has now, beside single numbers such as counts of steps."""
    return bytes_in(dict(optimizer.state))


def bytes_in(state: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(state) if isinstance(t, Tensor) and t.dim())


def state_of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[int, int]:
    """Bytes of state of one parameter group, found by a step of PyTorch's own class on parameters without data.

    The user's code is not called, nor the class's ``step``, in which hooks and profilers may hang. An optimizer that is
    not PyTorch's, or needs data for its step, is taken to hold two numbers for each parameter, as Adam does, until it
    has made a step.
    """
    parameters = [p for p in group["params"] if p.requires_grad]
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
    step = step_wrappers(own)[-1]
    try:
        if not is_defined_in_torch(step):
            raise NotImplementedError("its step was replaced")
        with torch.no_grad():
            step(twin)
    except Exception as error:  # whatever an optimizer may not do without data
        log.debug("%s does not step without data: %s", type(optimizer).__name__, error)
        return {id(p): 2 * p.numel() * p.element_size() for p in parameters}
    return {id(p): bytes_in({**twin.state[t]}) for p, t in zip(parameters, twins, strict=True)}


def state_for(name: str, tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of state that an optimizer of PyTorch's, by its name in any case, keeps for each of some tensors, by
    identity."""
    kinds: dict[str, Any] = {
        kind.lower(): found
        for kind in torch.optim.__all__
        if isinstance(found := getattr(torch.optim, kind), type) and issubclass(found, torch.optim.Optimizer)
    }
    if name.lower() not in kinds:
        raise ValueError(f"optimizer={name!r} is none of PyTorch's; those are {', '.join(sorted(kinds))}")
    trained = [t for t in tensors if t.is_leaf and t.requires_grad]
    twins = [torch.empty_like(t, device="meta").requires_grad_() for t in trained]
    found = state_of(kinds[name.lower()](twins, lr=1e-3)) if twins else {}
    return {id(t): found[id(twin)] for t, twin in zip(trained, twins, strict=True)}
