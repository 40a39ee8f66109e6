"""Running a `Step` in one of the two worlds: all but the calls of modules is the same lines."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin import BudgetError, materialize
from tests.exactness import real
from tests.lightning_plugin.step_worlds import Engine, Plain, SourceFailed, fresh
from tests.lightning_plugin.steps import (
    Action,
    Ask,
    Backward,
    Call,
    Change,
    Drop,
    Nudge,
    Statistics,
    Step,
)

# Actions -------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a step leaves behind: ``losses`` (with all other numbers that were asked for), ``gradients``, ``buffers``;
    or the error that ended it, and where. No buffers: the step was begun twice."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None
    at: int = -1


class Run:
    """One run of a step's actions in one world."""

    def __init__(self, step: Step, nets: nn.ModuleList, tensors: list[Tensor], world: Any) -> None:
        self.step, self.nets, self.tensors, self.world = step, nets, tensors, world
        self.results: list[Any] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        torch.manual_seed(self.step.seed + 1)
        for at, action in enumerate(self.step.actions):
            try:
                ACTIONS[type(action)](self, action, f"{at} {type(action).__name__.lower()}")
            except BudgetError:
                raise
            except SourceFailed:
                raise
            except RuntimeError as error:
                self.outcome.error, self.outcome.at = error, at
                return self.outcome
        try:
            return self.left()
        except RuntimeError as error:  # a buffer still awaited a call whose parameters were changed
            self.outcome.error, self.outcome.at = error, len(self.step.actions)
            return self.outcome

    def left(self) -> Outcome:
        """What the step leaves behind."""
        found = self.outcome
        found.gradients = {name: p.grad for name, p in self.nets.named_parameters()}
        found.gradients |= {f"image {i}": x.grad for i, x in enumerate(self.tensors) if x.requires_grad}
        found.buffers |= {name: b.clone() for name, b in self.nets.named_buffers()}
        for i, net in enumerate(self.nets):
            if net.seen and net.about.inside != "checkpoint":  # which plain PyTorch runs twice
                found.losses[f"numbers of network {i}"] = torch.tensor(net.seen, dtype=torch.float64)
        return found

    def do_call(self, action: Call, name: str) -> None:
        net = self.nets[action.network]
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.step.dtype == "autocast")
        with MODES[action.how](net), autocast:
            self.results.append(self.world.call(action.network, action.image))

    def do_ask(self, action: Ask, name: str) -> None:
        value = self.loss(action.call, action.part)
        try:
            number = value.item()
        except SourceFailed:
            number = value.item()  # it is there again
        self.outcome.losses[name] = torch.tensor(number, dtype=torch.float64)

    def do_backward(self, action: Backward, name: str) -> None:
        if action.product:
            (a, i), (b, j) = action.terms
            loss = real(self.results[a][i] * self.results[b][j]).sum()
        else:
            loss = sum((self.loss(*t) for t in action.terms[1:]), self.loss(*action.terms[0]))
        self.outcome.losses[f"{name} requires grad"] = torch.tensor(float(loss.requires_grad))
        if loss.requires_grad:
            loss.backward(retain_graph=action.retain or action.twice)
            if action.twice:
                loss.backward(retain_graph=action.retain)
        self.outcome.losses[name] = materialize(loss).detach().double()

    def loss(self, call: int, part: int) -> Tensor:
        v = real(self.results[call][part])
        generator = torch.Generator().manual_seed(100 * call + part)
        weight = torch.randn(v.shape, generator=generator).bfloat16().to(v.dtype)
        return (v * weight).sum() + v.square().mean()

    def do_drop(self, action: Drop, name: str) -> None:
        self.results[action.call] = None
        gc.collect(0)

    def do_statistics(self, action: Statistics, name: str) -> None:
        for key, module in self.nets[action.network].named_modules():
            if getattr(module, "running_mean", None) is not None:
                if action.what == "reset":
                    if getattr(self.world, "safe", False):  # what was saved for backward is not written over
                        for name in ("running_mean", "running_var"):
                            setattr(module, name, getattr(module, name).clone())
                    module.reset_running_stats()
                else:
                    self.outcome.buffers[f"{name} {key}"] = module.running_mean.clone()

    def do_change(self, action: Change, name: str) -> None:
        with torch.no_grad():
            self.tensors[action.image].mul_(-0.5)

    def do_nudge(self, action: Nudge, name: str) -> None:
        with torch.no_grad():
            for p in self.nets[action.network].parameters():
                p.mul_(0.5)


ACTIONS: dict[type[Action], Callable[..., None]] = {
    Call: Run.do_call, Ask: Run.do_ask, Backward: Run.do_backward, Drop: Run.do_drop,
    Statistics: Run.do_statistics, Change: Run.do_change, Nudge: Run.do_nudge,
}  # fmt: skip


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    net.eval()
    try:
        yield
    finally:
        net.train()


MODES: dict[str, Callable[[nn.Module], Any]] = {
    "train": lambda net: nullcontext(), "no_grad": lambda net: torch.no_grad(), "frozen": frozen, "eval": evaluating
}  # fmt: skip


# A step, whole --------------------------------------------------------------------------------------------------------


def run_plain(
    step: Step, dtype: torch.dtype | None = None, safe: bool = False, jitter: float = 0.0, seed: int = 0
) -> Outcome:
    """With plain PyTorch, in the step's own type or another."""
    nets, tensors = fresh(step, dtype, jitter, seed)
    if dtype is not None:
        step = replace(step, dtype="float64")
    return Run(step, nets, tensors, Plain(step, nets, tensors, safe)).run()


def run_tiled(step: Step) -> Outcome:
    """With the engine. A step that a read ends in the middle is begun again; one that its budget is too small for, with
    the smallest that works."""
    budget = step.way.budget
    for _ in range(9):
        nets, tensors = fresh(step, None, 0.0, 0)
        try:
            return once(step, nets, tensors, budget)
        except BudgetError as error:
            assert budget is not None, "BudgetError without a budget"
            assert error.smallest > budget, f"of a budget of {budget}, told that {error.smallest} would do"
            budget = error.smallest
    raise AssertionError(f"nine budgets in turn, the last {budget}, were said to be enough")


def once(step: Step, nets: nn.ModuleList, tensors: list[Tensor], budget: int | None) -> Outcome:
    world = Engine(step, nets, tensors, budget)
    for begun in range(1 + sum(image.fails is not None for image in step.images)):
        try:
            found = Run(step, nets, tensors, world).run()
        except SourceFailed:  # a user who catches this begins the step again, with the same modules and images
            nets.zero_grad(set_to_none=True)
            for x in tensors:
                x.grad = None
            for net in nets:
                net.seen.clear()
            continue
        if begun:
            found.buffers = {}  # how often a batch counts whose step came to nothing, is anybody's guess
        return found
    raise AssertionError("a source that fails once failed again")
