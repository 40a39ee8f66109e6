"""The update of streamed parameters: one after the other, within backward where that changes nothing.

[Note: update] An optimizer makes its step on a streamed parameter where that lives, parameter by parameter, and what it
keeps for one goes there too before the next: so never more than one is worked on. Where nothing looks at gradients
between backward and the step, each parameter's step is made as soon as its gradient is complete, and the gradient goes
at once: gradients of all parameters never exist together. Who may look is listed in `reasons`; where somebody does, the
same steps are made when the optimizer's step is called.
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

from lightning_plugin.private import has_step_hooks, is_pytorchs, step_chain
from lightning_plugin.residency.homes import Homes

#: Optimizers whose step on a parameter depends on no other parameter; of others the step is made whole.
BY_PARAMETER = (
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
    torch.optim.AdamW, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
#: Hooks of modules and callbacks that may look at gradients, or do something between backward and the step.
LOOKING = (
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients", "optimizer_step",
    "on_before_zero_grad", "optimizer_zero_grad",
)  # fmt: skip

#: The files in which Lightning's own classes have these, empty or as any run has them.
EMPTY = ("callbacks.callback", "core.hooks", "core.module")


@contextmanager
def within_backward(optimizers: Sequence[Optimizer], homes: Homes) -> Iterator[None]:
    """A backward pass in which each streamed parameter is updated, and its gradient dropped, once that is complete."""

    def update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        step(optimizer, group, parameter, homes)
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(partial(update, optimizer, group))
        for optimizer in optimizers
        for p, group in streamed(optimizer, homes)
        if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, homes: Homes) -> None:
    """An optimizer's step on one parameter; what it keeps for it then lives where that does."""
    twin: Any = Optimizer.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.param_groups = [{**group, "params": [parameter]}]
    step_chain(type(optimizer))[-1](twin)  # who counts calls of the class's step counts whole steps
    tier = homes.tier(parameter)
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and tier == "disk" and homes.file(value) is None:
            state[name] = homes.moved(value, tier, value.device)
    worked_on = (parameter, parameter.grad, *state.values())
    homes.rest_of(t for t in worked_on if isinstance(t, Tensor))


def by_parameter(optimizer: Optimizer, homes: Homes) -> None:
    """Have an optimizer's step make the steps on streamed parameters one after the other, and then its own on the
    rest."""
    whole: Callable[..., Any] = optimizer.step
    if not separable(optimizer) or getattr(whole, "homes", None) is homes:  # which stays, whatever wraps it
        return

    @wraps(whole)
    def steps(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = []
        if not has_step_hooks(self):
            for p, group in streamed(self, homes):
                if p.grad is not None:
                    step(self, group, p, homes)
                    done.append((p, p.grad))
                    p.grad = None
        try:
            whole()
        finally:
            for p, gradient in done:
                p.grad = gradient
        return loss

    steps.homes = homes  # type: ignore[attr-defined]
    optimizer.step = MethodType(steps, optimizer)  # type: ignore[method-assign]


def separable(optimizer: Optimizer) -> bool:
    """True if an optimizer may make its step parameter by parameter: it is PyTorch's own, replaced by nobody."""
    kind = type(optimizer)
    return kind in BY_PARAMETER and all(map(is_pytorchs, step_chain(kind)))


def streamed(optimizer: Optimizer, homes: Homes) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The streamed parameters of an optimizer, with their groups."""
    return ((p, group) for group in optimizer.param_groups for p in group["params"] if p in homes)


def reasons(optimizers: Sequence[Optimizer], trainer: Any) -> Iterator[str]:
    """The reasons for which steps may not be made within backward."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "optimization is manual"
    if len(optimizers) > 1:
        yield "there are several optimizers"
    if trainer.accumulate_grad_batches != 1:
        yield "gradients are accumulated"
    if trainer.gradient_clip_val is not None:
        yield "gradients are clipped"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "gradients are scaled"
    for optimizer in optimizers:
        if not separable(optimizer):
            yield f"{type(optimizer).__name__} is not known to treat parameters one by one"
        elif has_step_hooks(optimizer):
            yield f"{type(optimizer).__name__} has hooks on its step"
    for who in (module, *trainer.callbacks):
        for name in LOOKING:
            own = getattr(type(who), name, None)
            if own is not None and not own.__module__.endswith(EMPTY):
                yield f"{type(who).__name__} has {name}"
