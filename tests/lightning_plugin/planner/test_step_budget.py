"""A budget is for all that a step holds, however many calls, images and losses it has: judged by the allocator's books.

The steps are those of `step_draws`, with images large enough that memory is that of maps.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from lightning_plugin import BudgetError, TiledModule
from tests.lightning_plugin.outside import Account, account
from tests.lightning_plugin.step_draws import answerable, steps
from tests.lightning_plugin.step_parts import EDITS
from tests.lightning_plugin.step_runs import Outcome, Run
from tests.lightning_plugin.step_worlds import Engine, Plain, fresh
from tests.lightning_plugin.steps import Ask, Backward, Call, Drop, Image, Network, Step, Way

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
#: Under smaller budgets, what counts are single numbers and tables of positions, which no plan knows of.
LEAST = 64 * 2**10
#: What the code around the modules holds: weights of losses, results, what autograd saves of them.
OWN = 2**10
SIDES = 4
#: How often each action may be refused. With more room the calls before it take more, too, so that what is enough for
#: one may be too little again when its turn comes: what is named is what is enough as things lie.
ROUNDS = 2


def large(step: Step) -> Step:
    """Larger images, and nothing that a budget has no say in: maps that the user wants whole, changes, failures.
    Several networks have one budget: that of the image."""
    images = tuple(replace(i, side=(SIDES * i.side[0], SIDES * i.side[1]), fails=None) for i in step.images)
    nets = tuple(
        replace(n, returns="vector", edit="nothing" if EDITS[n.edit].odd else n.edit) for n in step.networks
    )  # fmt: skip
    way = replace(step.way, calls="lazy") if len(nets) > 1 else step.way
    return answerable(replace(step, images=images, networks=nets, way=way))


def quiet(step: Step) -> bool:
    """Whether it only calls and pulls back, drops and asks."""
    return {type(a).__name__ for a in step.actions} <= {"Call", "Backward", "Drop", "Ask"}


@dataclass
class Books:
    """A step under a budget: what it held, by the allocator; how often it was refused before; what parameters it has
    beyond those of its smallest network, which a plan that was made before those were met cannot know of."""

    budget: int
    outside: Account
    refusals: int
    unmet: int

    @property
    def kept(self) -> bool:
        return self.outside.held <= self.budget + OWN + self.unmet


class Repeated:
    """A step that can be run again, with the same modules, images and plans."""

    def __init__(self, step: Step, make: Callable[..., Any]) -> None:
        self.step = step
        self.nets, self.tensors = fresh(step, None, 0.0, 0)
        self.world = make(step, self.nets, self.tensors)

    def __call__(self) -> Outcome:
        for x in self.tensors:
            x.grad = None
        found = Run(self.step, self.nets, self.tensors, self.world).run()
        if found.error is not None:
            raise found.error
        gc.collect()
        return found


def under_budget(step: Step, share: float) -> Books | None:
    """The step under a share of what plain PyTorch holds, or under the smallest budget that works if that is more;
    None where PyTorch refuses it, or nothing is planned."""
    plain = Repeated(step, Plain)
    try:
        most = account(plain, plain.nets).held
    except RuntimeError:
        return None
    budget = max(LEAST, int(share * most))
    for refusals in range(1 + ROUNDS * len(step.actions)):
        tiled = Repeated(step, lambda *how: Engine(*how, budget=budget))  # noqa: B023
        try:
            books = Books(budget, account(tiled, tiled.nets), refusals, unmet(tiled.nets))
            return books if tiled.world.planned else None
        except BudgetError as error:
            assert error.smallest > budget, f"refused {budget} bytes, and told that {error.smallest} would do"
            budget = error.smallest
    raise AssertionError(f"the last of {refusals} budgets that were said to be enough is {budget}")


def unmet(nets: nn.ModuleList) -> int:
    sizes = [sum(t.untyped_storage().nbytes() for t in (*n.parameters(), *n.buffers())) for n in nets]
    return sum(sizes) - min(sizes)


def run(examples: int, fixed: int) -> list[Books]:
    found: list[Books] = []

    @seed(fixed)
    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(steps(("float32",)).filter(quiet).map(large), st.floats(0.3, 0.95))
    def every(step: Step, share: float) -> None:
        books = under_budget(step, share)
        if books is not None:
            assert books.kept, (books, step)
            found.append(books)

    every()
    return found


def test_sampled_steps_keep_their_budget() -> None:
    assert len(run(2, 0)) >= 1


#: What once broke its budget, or was not planned at all, each with its share.
BROKE = {
    # Reflected rows are copied to what they border on; tiles inside are views. The second pass has little room.
    "a border tile that is put together": (0.35, Step(
        "float32",
        (Image((108, 48), "noise", batch=2), Image((80, 100), "margins", kind="leaf")),
        (
            Network(("reflect3", "relu", "tanh", "instance", "cumulative batch"), ("adaptive average", "std")),
            Network(("reflect3",), ("adaptive average",), small="v[:, :1].mul_(3)", tied=True),
        ),
        (Call(0, 0, "frozen"), Call(1, 1), Backward(((0, 1), (0, 0), (1, 0)), retain=True, twice=True)),
        Way("lazy", (2, 2)),
        width=6,
        seed=359,
    )),
    # What the draws found: an image's gradients of several calls, which autograd adds up by itself.
    "barriers and a retained graph": (0.7519827707050775, Step(
        "float32",
        (Image((52, 108), "noise", kind="leaf"),),
        (
            Network(("down3", "tanh", "conv1"), ("median", "adaptive max"), hook=True),
            Network(("conv3", "conv1", "conv1", "max pool", "conv5", "conv1"), ("sort", "amin"),
                    inside="functional_call"),
        ),
        (
            Call(0, 0), Call(1, 0), Call(0, 0), Call(1, 0, "frozen"),
            Backward(((2, 1), (3, 0), (1, 1), (0, 1)), retain=True),
            Backward(((1, 0), (2, 0)), product=True), Backward(((3, 1),)), Backward(((0, 0),), retain=True),
        ),
        Way("lazy", (2, 3)),
        width=6,
        seed=114,
    )),
    # One of two results is pulled back alone: what only the other needs is not let go on the way.
    "results that are pulled back apart": (0.6089782214884314, Step(
        "float32",
        (Image((68, 156), "whole", kind="leaf"),),
        (Network(("down3", "conv3", "down3", "valid3", "conv3"), ("amax", "max and where"), hook=True),),
        (
            Call(0, 0, "frozen"), Ask(0, 0), Call(0, 0), Drop(1), Call(0, 0), Backward(((2, 1),), retain=True),
            Backward(((2, 0),)), Backward(((0, 1), (0, 0)), retain=True, twice=True, product=True),
        ),
        Way("tiled", (4, 2)),
        width=4,
        whole=True,
        seed=428,
    )),
    # Of the positions in a row that topk selects from, the first tile of a grid of rows, columns and images has none.
    "a target without a share in the first tile": (0.9, Step(
        "float32",
        (Image((80, 116), "repeated", batch=2),),
        (
            Network(("valid3", "relu_", "cumulative batch"), ("topk",)),
            Network(("conv1", "relu_", "instance", "down3", "conv1"), ("max pool",), small="v.register_hook(double)",
                    tied=True, inside="functional_call"),
        ),
        (
            Call(0, 0), Backward(((0, 0),)), Call(1, 0, "frozen"), Call(1, 0, "frozen"), Call(0, 0, "frozen"),
            Backward(((1, 0), (2, 0)), retain=True, product=True), Backward(((3, 0),)),
        ),
        Way("lazy", (3, 4)),
        width=6,
        seed=414,
    )),
    # The median's map has 58 rows, topk's positions are 6,148 in a row: tiles of so many of them are those of both.
    "one of two results of other sizes pulled back alone": (0.3, Step(
        "float32",
        (Image((60, 108), "margins", batch=2),),
        (
            Network(("valid3", "conv5", "group", "reflect3"), ("median", "topk"), small="v[:, 0] = 0", hook=True),
            Network(("conv5",), ("std",), inside="functional_call"),
        ),
        (
            Call(0, 0), Call(1, 0), Backward(((0, 1),), retain=True), Backward(((0, 0),)), Backward(((1, 0),)),
        ),
        Way("lazy", (1, 1)),
        width=6,
        seed=12,
    )),
}  # fmt: skip


#: The steps that take longest.
LONG = (
    "results that are pulled back apart",
    "a target without a share in the first tile",
    "one of two results of other sizes pulled back alone",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in LONG else []) for n in BROKE])
def test_what_broke_its_budget_keeps_it(name: str) -> None:
    share, step = BROKE[name]
    books = under_budget(step, share)
    assert books is not None and books.kept, books


@pytest.mark.full
def test_three_hundred_steps_keep_their_budget(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    found: list[Books] = []
    for part in range(1, 100):
        found += run(40, part)
        if len(found) >= 300:
            break
    assert len(found) >= 300
    shares = sorted(b.outside.held / b.budget for b in found)
    kernels = sorted((b.outside.peak - b.outside.held) / b.budget for b in found)
    values = {
        "steps": len(found),
        "refused before": sum(b.refusals > 0 for b in found),
        "refused more than once": sum(b.refusals > 1 for b in found),
        "most refusals": max(b.refusals for b in found),
        "largest held / budget": shares[-1],
        "median held / budget": shares[len(shares) // 2],
        "largest share of single kernels, for themselves": kernels[-1],
    }
    record_result("step_memory", values)


NET = Network(("conv3", "batch", "relu", "conv3"), ("mean",))
IMAGE = Image((128, 120), "noise")
STEPS = {
    "one call": ((NET,), (IMAGE,), (Call(0, 0), Backward(((0, 0),)))),
    "four calls, one loss": (
        (NET,), (IMAGE,) * 4, (*(Call(0, i) for i in range(4)), Backward(tuple((i, 0) for i in range(4))))
    ),
    "two networks, two losses": (
        (NET, NET), (IMAGE,), (Call(0, 0), Call(1, 0), Backward(((1, 0),)), Backward(((0, 0),)))
    ),
    "a source beside a tensor": (
        (NET,), (IMAGE, replace(IMAGE, kind="source")), (Call(0, 0), Call(0, 1), Backward(((0, 0), (1, 0))))
    ),
}  # fmt: skip


SAMPLED = (("one call", "tiled"), ("two networks, two losses", "lazy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param(name, calls, marks=[] if (name, calls) in SAMPLED else [pytest.mark.full])
        for name in STEPS
        for calls in ("tiled", "lazy")
    ],
)
def test_everyday_steps_keep_their_budget(name: str, calls: Any) -> None:
    nets, images, actions = STEPS[name]
    if len(nets) > 1:
        calls = "lazy"
    found = under_budget(Step("float32", images, nets, actions, Way(calls), width=8), 0.4)
    assert found is not None and found.kept, found


def net() -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


@pytest.mark.slow
def test_calls_that_wait_for_one_backward_share_a_budget() -> None:
    """Each is planned when it comes; told how many will, the first leave room for the others."""
    images = [torch.randn(1, 3, 96, 88) for _ in range(3)]
    plain = net()
    alone = account(lambda: plain(images[0]).sum().backward(), plain).held

    def step(calls: int) -> Callable[[], None]:
        tiled = TiledModule(plain, budget=int(1.8 * alone), disk=False, calls=calls)
        return lambda: sum(tiled(x).sum() for x in images).backward()  # type: ignore[union-attr]

    with pytest.raises(BudgetError, match="calls=3"):
        step(1)()
    assert account(step(3), plain).held <= 1.8 * alone + OWN


def test_too_many_calls_for_a_budget_are_an_error_that_names_one_that_works() -> None:
    plain, x = net(), torch.randn(1, 3, 96, 88)
    with pytest.raises(BudgetError, match="for 40 calls that wait for one backward") as refused:
        TiledModule(plain, budget="4MiB", calls=40, disk=False)(x)
    plan = TiledModule(plain, budget=refused.value.smallest, calls=40, disk=False)
    plan(x)
    with pytest.raises(ValueError, match="calls=0"):
        TiledModule(plain, budget="1MiB", calls=0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_refusal_names_a_budget_for_all_calls_that_is_enough_and_not_generous(count: int) -> None:
    """Gradients of earlier calls wait beside those of the next, and so may the sum of both."""
    plain = nn.Sequential(
        nn.Conv2d(3, 96, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(96, 96, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    images = [torch.randn(1, 3, 48, 48) for _ in range(count)]

    def step(budget: int, calls: int) -> Callable[[], None]:
        plain.zero_grad()
        tiled = TiledModule(plain, budget=budget, calls=calls, disk=False)
        return lambda: sum(tiled(x).sum() for x in images).backward()  # type: ignore[union-attr]

    def refused(budget: int, calls: int) -> BudgetError:
        with pytest.raises(BudgetError) as error:
            step(budget, calls)()
        return error.value

    enough = refused(1000, count).smallest
    gradients = sum(p.nbytes for p in plain.parameters())
    assert enough - gradients - OWN <= 1.1 * account(step(enough, count), plain).held
    if count == 2:  # the number of calls was not given: the error in backward names what it takes with it
        told = str(refused(refused(1000, 1).smallest, 1))
        named = re.search(r"calls=2\) plans them together, within ([\d.]+) MiB", told)
        assert named is not None and enough <= float(named[1]) * 2**20 <= 1.1 * enough


def test_the_books_see_what_is_held() -> None:
    """A step that holds a map more than it says is found out."""
    nets, images, actions = STEPS["one call"]
    repeated = Repeated(Step("float32", images, nets, actions, width=8), Plain)
    kept: list[Any] = []
    honest = account(repeated, repeated.nets)

    def greedy() -> None:
        repeated.nets[0].layers[0].register_forward_hook(lambda module, args, out: kept.append(out * 1))
        repeated()

    before = honest.held
    assert account(greedy, repeated.nets).held >= before + 4 * 8 * 128 * 120


def branches() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)).double()


class Asks(nn.Module):
    """A network that looks at a number between its layers: a second recording gives the image a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = branches()[:3], nn.Conv2d(8, 8, 3, 2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h if h.mean().item() > -1 else -h).mean((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "calls", "told", "disk", "grad"),
    [(branches, 3, True, False, True), (branches, 3, False, True, True),
     pytest.param(branches, 2, False, False, False, marks=pytest.mark.full), (Asks, 1, False, False, True)],
)  # fmt: skip
def test_the_budget_that_a_refusal_names_works(
    make: Callable[[], nn.Module], calls: int, told: bool, disk: bool, grad: bool
) -> None:
    """A user who gives what the error asks for is refused twice at most; one who says how many calls wait, once, and
    before anything was computed."""
    torch.manual_seed(1)
    views = [torch.randn(2, 3, 64, 80, dtype=torch.float64, requires_grad=grad) for _ in range(calls)]
    budget, refusals = LEAST, 0
    done: list[torch.Tensor] = []

    def step(tiled: TiledModule) -> None:
        done.clear()
        for x in views:
            x.grad = None
            done.append(tiled(x).pow(2).sum())
        torch.stack(done).sum().backward()

    while True:
        plain = make()
        tiled = TiledModule(plain, budget=budget, disk=disk, **({"calls": calls} if told else {}))
        try:
            found = account(partial(step, tiled), plain)
            break
        except BudgetError as refused:
            refusals += 1
            assert refusals <= (1 if told else 2) and not (told and done), str(refused)
            budget = refused.smallest
    assert found.held <= budget + OWN
