"""Running a `Step`: once with plain PyTorch on ordinary tensors, once with the engine; all else is the same lines.

The plain run shares no code with the engine: it is what the engine is judged by.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_plugin import Box, BudgetError, LazyImage, TiledModule, materialize
from lightning_plugin.settings import Settings
from tests.lightning_plugin.step_parts import CONTENTS, EDITS, LAYERS, POOLS, SMALLS
from tests.lightning_plugin.steps import (
    Action, Ask, Backward, Call, Change, Drop, Image, Network, Nudge, Statistics, Step, Way,
)  # fmt: skip

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32
}  # fmt: skip


class SourceFailed(OSError):
    """What a source raises whose image cannot be read just now."""


# Networks and images -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A `Network`."""

    def __init__(self, about: Network, width: int) -> None:
        super().__init__()
        self.about = about
        self.safe = False
        channels, layers = 3, []
        for name in about.layers:
            layers.append(LAYERS[name](channels, width))
            channels = width
        self.layers = nn.Sequential(*layers)
        if about.hook:
            self.layers[0].register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self.layers, x, use_reentrant=False) if self.about.inside == "checkpoint" else self.layers(x)
        return y if self.about.returns == "map" else self.after(y)

    def after(self, y: Tensor) -> list[Tensor]:
        """What becomes of the map; ``safe`` writes into copies, where the user writes into what others may need."""
        edit, (small, writes) = EDITS[self.about.edit], SMALLS[self.about.small]
        y = edit.apply(y.clone() if self.safe and edit.writes else y)
        results = [POOLS[name].apply(y) for name in self.about.pools]
        return [small(v.clone() if self.safe and writes else v) for v in results]


def networks(step: Step) -> nn.ModuleList:
    torch.manual_seed(step.seed)
    nets = nn.ModuleList(Net(about, step.width) for about in step.networks)
    if step.whole:
        for p in nets.parameters():
            p.data = torch.randint(-1, 2, p.shape).float()
    first = nets[0].layers[0].weight
    for net in nets[1:]:
        if net.about.tied and net.layers[0].weight.shape == first.shape:
            net.layers[0].weight = first
    return nets.to(DTYPES[step.dtype])


def pixels(step: Step, i: int) -> Tensor:
    image = step.images[i]
    generator = torch.Generator().manual_seed(1000 * step.seed + i)
    return CONTENTS[image.content]((image.batch, 3, *image.side), generator).to(DTYPES[step.dtype])


class Pixels:
    """A `TileSource` over a tensor, which fails once where it is told to."""

    def __init__(self, tensor: Tensor, fails: int | None) -> None:
        self.tensor, self.fails, self.reads = tensor, fails, 0
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, box: Box) -> Tensor:
        self.reads += 1
        if self.reads == self.fails:
            raise SourceFailed(f"the network was away at read {self.reads}")
        (top, bottom), (left, right) = box.intervals()
        return self.tensor[..., top:bottom, left:right].clone()

    def constant(self, box: Box) -> Tensor | None:
        return None


# The two worlds ------------------------------------------------------------------------------------------------------


class Plain:
    """Ordinary tensors, ordinary modules. ``safe``: with a copy of whatever the step changes later, so that the number
    is known also where PyTorch refuses to compute it."""

    def __init__(self, step: Step, nets: nn.ModuleList, tensors: list[Tensor], safe: bool = False) -> None:
        self.nets, self.tensors, self.safe = nets, tensors, safe
        for net in nets:
            net.safe = safe

    def call(self, network: int, image: int) -> Any:
        net, x = self.nets[network], self.tensors[image]
        if not self.safe:
            return called(net, net, x)
        return called(net, net, x * 1, {name: p * 1 for name, p in net.named_parameters()})


class Engine:
    """The engine's public names only."""

    def __init__(self, step: Step, nets: nn.ModuleList, tensors: list[Tensor], budget: int | None) -> None:
        self.nets, self.way = nets, step.way
        how: dict[str, Any] = {"tiles": step.way.tiles, "backward_tiles": step.way.backward_tiles}
        how = {"budget": budget} if budget else how
        self.tiled = [TiledModule(net, **how) for net in nets]
        self.settings = Settings(**how)
        self.inputs = [self.input(image, x) for image, x in zip(step.images, tensors, strict=True)]

    def input(self, image: Image, x: Tensor) -> Tensor:
        if image.kind == "source":
            return LazyImage(Pixels(x, image.fails), settings=self.settings)
        return x if self.way.calls == "tiled" else LazyImage.from_tensor(x, settings=self.settings)

    def call(self, network: int, image: int) -> Any:
        module = self.nets[network] if self.way.calls == "lazy" else self.tiled[network]
        return called(module, self.nets[network], self.inputs[image])


def called(module: nn.Module, net: Any, x: Tensor, instead: dict[str, Tensor] | None = None) -> Any:
    """The results of a call, as a user's code has them who calls ``module``; perhaps with other parameters."""
    if net.about.inside == "functional_call":
        instead = {name: 1.5 * p for name, p in (instead or dict(module.named_parameters())).items()}
    out = functional_call(module, instead, (x,)) if instead else module(x)
    return net.after(out) if net.about.returns == "map" else out


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
        found = self.outcome
        found.gradients = {name: p.grad for name, p in self.nets.named_parameters()}
        found.gradients |= {f"image {i}": x.grad for i, x in enumerate(self.tensors) if x.requires_grad}
        found.buffers |= {name: b.clone() for name, b in self.nets.named_buffers()}
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
            loss = (self.results[a][i] * self.results[b][j]).sum()
        else:
            loss = sum((self.loss(*t) for t in action.terms[1:]), self.loss(*action.terms[0]))
        self.outcome.losses[f"{name} requires grad"] = torch.tensor(float(loss.requires_grad))
        if loss.requires_grad:
            loss.backward(retain_graph=action.retain or action.twice)
            if action.twice:
                loss.backward(retain_graph=action.retain)
        self.outcome.losses[name] = materialize(loss).detach().double()

    def loss(self, call: int, part: int) -> Tensor:
        v = self.results[call][part]
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
                        module.running_mean, module.running_var = module.running_mean.clone(), module.running_var.clone()
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


# A step, whole -------------------------------------------------------------------------------------------------------


def fresh(step: Step, dtype: torch.dtype | None, jitter: float, seed: int) -> tuple[nn.ModuleList, list[Tensor]]:
    """Networks and images; in another type, with the same numbers; with parameters that are ``jitter`` off."""
    nets = networks(step)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in nets.parameters() if jitter else ():
            p.mul_((1 + jitter * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype))
    tensors = [pixels(step, i) for i in range(len(step.images))]
    if dtype is not None:
        nets, tensors = nets.to(dtype), [x.to(dtype) for x in tensors]
    tensors = [x.requires_grad_(image.kind == "leaf") for x, image in zip(tensors, step.images, strict=True)]
    return nets, tensors


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
    try:
        return Run(step, nets, tensors, world).run()
    except SourceFailed:
        pass  # a user who catches this begins the step again, with the same modules and images
    nets.zero_grad(set_to_none=True)
    for x in tensors:
        x.grad = None
    found = Run(step, nets, tensors, world).run()
    found.buffers = {}  # how often a batch counts whose step came to nothing, is anybody's guess
    return found
