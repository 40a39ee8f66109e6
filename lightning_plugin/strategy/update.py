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

from lightning_plugin.private import forget_step_hooks, has_step_hooks
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


class Updates:
    """The steps of a run's optimizers on what is streamed."""

    def __init__(self, homes: Homes) -> None:
        self.homes = homes
        self.fused = False
        self._passing = False
        self._ready: set[int] = set()

    def prepare(self, optimizers: Sequence[Optimizer], trainer: Any) -> list[str]:
        """Make optimizers ready for a backward pass, and say why steps are not made within it."""
        why = list(reasons(optimizers, trainer))
        self.fused = not why
        for optimizer in optimizers:
            if id(optimizer) not in self._ready and separable(optimizer):
                self._ready.add(id(optimizer))
                by_parameter(optimizer, self)
            for p, _ in streamed(optimizer, self.homes) if separable(optimizer) else ():
                if id(p) not in self._ready:
                    self._ready.add(id(p))
                    p.register_post_accumulate_grad_hook(partial(self.complete, optimizer))
        return why

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A backward pass of training: no other may change a parameter."""
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def complete(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """A parameter's gradient is complete."""
        if not (self.fused and self._passing):
            return
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                self.step(optimizer, group, parameter)
                parameter.grad = None

    @torch.no_grad()
    def step(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        """An optimizer's step on one parameter; what it keeps for it then lives where that does."""
        twin: Any = Optimizer.__new__(type(optimizer))
        vars(twin).update(vars(optimizer))
        twin.param_groups = [{**group, "params": [parameter]}]
        forget_step_hooks(twin)  # they are for whole steps
        type(optimizer).step(twin)
        tier = self.homes.tier(parameter)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and tier == "disk" and self.homes.file(value) is None:
                state[name] = self.homes.moved(value, tier, value.device)
        worked_on = (parameter, parameter.grad, *state.values())
        self.homes.rest_of(t for t in worked_on if isinstance(t, Tensor))


def by_parameter(optimizer: Optimizer, updates: Updates) -> None:
    """Have an optimizer's step make the steps on streamed parameters one after the other, and then its own on the
    rest."""
    whole: Callable[..., Any] = optimizer.step

    @wraps(whole)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = []
        if not has_step_hooks(self):
            for p, group in streamed(self, updates.homes):
                if p.grad is not None:
                    updates.step(self, group, p)
                    done.append((p, p.grad))
                    p.grad = None
        try:
            whole()
        finally:
            for p, gradient in done:
                p.grad = gradient
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def separable(optimizer: Optimizer) -> bool:
    """Whether an optimizer may make its step parameter by parameter."""
    return type(optimizer) in BY_PARAMETER


def streamed(optimizer: Optimizer, homes: Homes) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The streamed parameters of an optimizer, with their groups."""
    return ((p, group) for group in optimizer.param_groups for p in group["params"] if p in homes)


def reasons(optimizers: Sequence[Optimizer], trainer: Any) -> Iterator[str]:
    """Why steps may not be made within backward."""
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
