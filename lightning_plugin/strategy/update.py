"""Update of streamed parameters: one at a time, within backward where that gives the same result.

[Note: update] The optimizer steps on a streamed parameter in the memory where it lives, one parameter at a time, and
its state for that parameter is moved there before the next one: no more than one parameter is in work. If nothing reads
gradients between backward and ``optimizer.step()``, a parameter is updated as soon as its gradient is complete, and the
gradient is freed at once: gradients of all parameters never exist together. `blockers` lists who may read gradients; if
there is any, the same updates are made when ``optimizer.step()`` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_plugin.private import has_step_hooks, is_defined_in_torch, step_wrappers
from lightning_plugin.residency.homes import Homes

#: Optimizers whose update of a parameter depends on no other parameter. All others step on all parameters together.
BY_PARAMETER = (
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
    torch.optim.AdamW, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
#: Hooks of modules and callbacks that may read gradients, or do something between backward and the optimizer's step.
GRADIENT_HOOKS = (
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients", "optimizer_step",
    "on_before_zero_grad", "optimizer_zero_grad",
)  # fmt: skip

#: Modules of Lightning with the default implementations of these hooks.
DEFAULT_MODULES = ("callbacks.callback", "core.hooks", "core.module")


@contextmanager
def update_in_backward(optimizers: Sequence[Optimizer], homes: Homes) -> Iterator[None]:
    """Context of a backward pass: update each streamed parameter, and free its gradient, once that is complete."""

    def update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        step_on_parameter(optimizer, group, parameter, homes)
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(partial(update, optimizer, group))
        for optimizer in optimizers
        for p, group in streamed_parameters(optimizer, homes)
        if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def step_on_parameter(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, homes: Homes) -> None:
    """Make an optimizer's step on one parameter, and move the optimizer's state of it to the parameter's tier."""
    single: Any = Optimizer.__new__(type(optimizer))
    vars(single).update(vars(optimizer))
    single.param_groups = [{**group, "params": [parameter]}]
    step_wrappers(type(optimizer))[-1](single)  # unwrapped: a profiler's wrapper counts whole steps
    tier = homes.tier(parameter)
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and tier == "disk" and homes.file(value) is None:
            state[name] = homes.copy_to_tier(value, tier, value.device)
    tensors = (parameter, parameter.grad, *state.values())
    homes.release_pages_of(t for t in tensors if isinstance(t, Tensor))


def patch_step(optimizer: Optimizer, homes: Homes) -> None:
    """Patch ``optimizer.step()``: it steps on streamed parameters one at a time, then on all others together."""
    original: Callable[..., Any] = optimizer.step
    if not is_separable(optimizer) or getattr(original, "homes", None) is homes:  # patched before, maybe wrapped since
        return

    @wraps(original)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = []
        if not has_step_hooks(self):
            for p, group in streamed_parameters(self, homes):
                if p.grad is not None:
                    step_on_parameter(self, group, p, homes)
                    updated.append((p, p.grad))
                    p.grad = None
        try:
            original()
        finally:
            for p, gradient in updated:
                p.grad = gradient
        return loss

    step.homes = homes  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def is_separable(optimizer: Optimizer) -> bool:
    """True if an optimizer may step on one parameter at a time: one of `BY_PARAMETER`, with PyTorch's own ``step``."""
    kind = type(optimizer)
    return kind in BY_PARAMETER and all(map(is_defined_in_torch, step_wrappers(kind)))


def streamed_parameters(optimizer: Optimizer, homes: Homes) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Iterate over the streamed parameters of an optimizer, with their parameter groups."""
    return ((p, group) for group in optimizer.param_groups for p in group["params"] if p in homes)


def blockers(optimizers: Sequence[Optimizer], trainer: Any) -> Iterator[str]:
    """Iterate over the reasons against updates within backward, in words."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "optimization is manual"
    if len(optimizers) > 1:
        yield "there are several optimizers"
    if trainer.world_size > 1:
        yield "gradients are averaged over devices"
    if trainer.accumulate_grad_batches != 1:
        yield "gradients are accumulated"
    if trainer.gradient_clip_val is not None:
        yield "gradients are clipped"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "gradients are scaled"
    for optimizer in optimizers:
        if not is_separable(optimizer):
            yield f"{type(optimizer).__name__} is not known to treat parameters one by one"
        elif has_step_hooks(optimizer):
            yield f"{type(optimizer).__name__} has hooks on its step"
    for owner in (module, *trainer.callbacks):
        for name in GRADIENT_HOOKS:
            hook = getattr(type(owner), name, None)
            if hook is not None and not hook.__module__.endswith(DEFAULT_MODULES):
                yield f"{type(owner).__name__} has {name}"
