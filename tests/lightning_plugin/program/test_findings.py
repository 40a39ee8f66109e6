"""Findings of tiles in one step serve the next, and only where the next computes the same.

Each case is a sequence of steps between which something changes. Every step is compared, to the bit, with one of a
module that has found nothing yet; and what the ledger says, with one that watches all tiles.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.engine import Engine
from lightning_plugin.execute import tile_pass
from lightning_plugin.ledger import Ledger
from lightning_plugin.program import findings
from lightning_plugin.program.findings import Library
from tests.lightning_plugin.compared import Step
from tests.lightning_plugin.networks import AnyPlan, Case, cases

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Net(nn.Module):
    """A little of everything: a skip, strides, statistics, dropout, an operator in place, a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.3)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)
        self.scale: Any = 2

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.norm(self.first(x)))
        deep = self.drop(F.max_pool2d(self.down(skip), 2))
        deep = F.interpolate(self.up(deep), scale_factor=2, mode="bilinear")
        return self.last(torch.cat([skip, deep], 1)) * self.scale


@dataclass
class World:
    """A network with what goes into it, and how it is run."""

    net: nn.Module = field(default_factory=lambda: Net().double())
    options: dict[str, Any] = field(default_factory=lambda: {"tiles": (3, 2), "backward_tiles": (2, 3)})
    side: int = 24
    autocast: bool = False
    image_grad: bool = False
    channels_last: bool = False
    passes: int = 1

    def step(self, tiled: TiledModule, number: int) -> tuple[list[Tensor], int]:
        """Results and gradients of a step, and its peak."""
        torch.manual_seed(number)
        dtype = next(self.net.parameters()).dtype
        x = torch.randn(1, 3, self.side, self.side + 4, dtype=torch.float64).to(dtype)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_(self.image_grad)
        tiled.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            loss = tiled(LazyImage(x)).square().mean()
        for i in range(self.passes):
            if loss.requires_grad:
                loss.backward(retain_graph=i + 1 < self.passes)
        found = [loss.detach(), *(t.grad for t in (x, *tiled.parameters()) if t.grad is not None)]
        return [t.clone() for t in (*found, *tiled.buffers())], tiled.peak_bytes


Change = Callable[[World], None]


def learn(world: World) -> None:
    with torch.no_grad():
        for p in world.net.parameters():
            p.add_(0.01)


def set_to(**what: Any) -> Change:
    def change(world: World) -> None:
        for name, value in what.items():
            setattr(world, name, value)

    return change


def on_net(change: Callable[[Any], Any]) -> Change:
    def changed(world: World) -> None:
        change(world.net)

    return changed


def attribute(path: str, value: Any) -> Change:
    *parts, name = path.split(".")
    return on_net(lambda net: setattr(net.get_submodule(".".join(parts)), name, value))


def freeze(frozen: bool) -> Change:
    return on_net(lambda net: net.first.requires_grad_(not frozen))


def new_bias(net: Net) -> None:
    net.first.bias = nn.Parameter(torch.ones_like(net.first.weight[:, 0, 0, 0]))


def no_bias(net: Net) -> None:
    net.first.bias = None


CHANGES: dict[str, list[Change]] = {
    "parameters": [learn, learn],
    "mode": [on_net(nn.Module.eval), on_net(nn.Module.train), on_net(nn.Module.eval)],
    "frozen layers": [freeze(True), freeze(False), freeze(True)],
    "all frozen": [on_net(lambda n: n.requires_grad_(False)), on_net(lambda n: n.requires_grad_(True))],
    "autocast": [set_to(autocast=True), set_to(autocast=False), set_to(autocast=True)],
    "size": [set_to(side=32), set_to(side=24), set_to(side=32)],
    "gradient of the image": [set_to(image_grad=True), set_to(image_grad=False), set_to(image_grad=True)],
    "order in memory": [set_to(channels_last=True), set_to(channels_last=False)],
    "weights' order in memory": [on_net(lambda n: n.to(memory_format=torch.channels_last))],
    "type": [on_net(nn.Module.float), on_net(nn.Module.double), on_net(nn.Module.bfloat16)],
    "a number": [attribute("scale", s) for s in (3, 3.0, True, 1, 1.0, -0.0, 0.0)],
    "in place": [attribute("relu.inplace", v) for v in (False, True)],
    "dropout's rate": [attribute("drop.p", p) for p in (0.5, 0.0, 0.3)],
    "a module": [attribute("relu", m) for m in (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.ReLU())],
    "a window": [attribute("last.dilation", 2), attribute("first.dilation", 3), attribute("first.dilation", 1)],
    "a parameter": [on_net(new_bias), on_net(no_bias), on_net(new_bias)],
    "retained graph": [set_to(passes=2), set_to(passes=1)],
}


@contextmanager
def thorough(watching: bool) -> Iterator[None]:
    before, Ledger.watch_all = Ledger.watch_all, watching
    try:
        yield
    finally:
        Ledger.watch_all = before


def of(world: World, library: Library) -> TiledModule:
    tiled = TiledModule(copy.deepcopy(world.net), **world.options)
    tiled.engine.library = library
    return tiled


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_seen(name: str) -> None:
    torch.manual_seed(0)
    world, library = World(), Library()
    for number, change in enumerate([set_to(), *CHANGES[name], set_to()]):
        change(world)
        with thorough(False):
            found, peak = world.step(of(world, library), number)
        with thorough(True):
            expected, most = world.step(of(world, Library()), number)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), number
        assert peak == most, number


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kinds of tiles and tapes that are looked for."""
    calls: list[str] = []
    record, kind_of = tile_pass.make_tape, findings.kind_of

    def recorded(*args: Any) -> Any:
        calls.append("tape")
        return record(*args)

    def looked(*args: Any) -> Any:
        calls.append("kind")
        return kind_of(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tile_pass, "make_tape", recorded)
        patch.setattr(findings, "kind_of", looked)
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tiles": (3, 2)}, {"budget": "48KiB"}], ids=str)
def test_a_second_step_looks_for_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout has another key in each step, parameters have other values, and gradients are there already."""
    world = World(options=options)
    tiled = TiledModule(world.net, **options)
    world.step(tiled, 0)
    learn(world)
    with counting(monkeypatch) as calls:
        world.step(tiled, 1)
        assert not calls
        world.side = 32
        world.step(tiled, 2)
        assert calls


@pytest.mark.slow
def test_a_second_step_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is, since its calls are written down; from the fourth on they are replayed."""
    world = World(options={"tiles": (8, 8)}, side=64)
    tiled = TiledModule(world.net.eval(), **world.options)
    seen: list[int] = []
    see = Ledger.count
    monkeypatch.setattr(Ledger, "count", lambda ledger, t: (seen.append(0), see(ledger, t))[1])
    counts = []
    with thorough(False):
        for number in range(4):
            seen.clear()
            world.step(tiled, number)
            counts.append(len(seen))
    assert counts[3] <= counts[1] < counts[0] / 2


class Count(TorchDispatchMode):
    """Number of dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_a_tile_dispatches_what_its_operators_take() -> None:
    """Three blocks of kernels of one position, so that no tile has a halo: what one tile more adds to a step."""
    blocks = [[nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True)] for _ in range(3)]
    net = nn.Sequential(*(layer for block in blocks for layer in block)).eval()
    x = torch.randn(1, 3, 32, 32)
    counts = []
    for tiles in (4, 8):
        tiled = TiledModule(net, tiles=(tiles, tiles))
        with thorough(False):
            for _ in range(2):
                with Count() as count:
                    tiled(LazyImage(x)).square().sum().backward()
        counts.append(count.operators)
    # Three operators a block forward, as many once more with what autograd saves of those in place, as many backward,
    # what BatchNorm takes for its own; and what a tile has besides: it is cut out, summed, and its gradients added.
    assert (counts[1] - counts[0]) / 48 <= 64, counts


def test_two_recordings_run_by_the_same_tapes_at_once() -> None:
    world = World()
    plain, tiled = copy.deepcopy(world.net).eval(), TiledModule(world.net.eval(), **world.options)
    images = [torch.randn(1, 3, 24, 28, dtype=torch.float64) for _ in range(3)]
    for net in (plain, tiled):
        losses = [net(x if net is plain else LazyImage(x)).square().sum() for x in images]
        for i in (1, 2, 0):
            losses[i].backward()
    for a, b in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-11, atol=1e-11)


def test_findings_hold_no_tensor_and_are_not_copied() -> None:
    world = World()
    tiled = TiledModule(world.net, **world.options)
    world.step(tiled, 0)
    library = tiled.engine.library
    assert library.findings
    seen: set[int] = set()
    stack: list[Any] = [library.findings]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, Tensor)
        assert type(thing).__name__ not in {"Node", "Value", "Program"}
        if isinstance(thing, dict):
            stack += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, frozenset)):
            stack += thing
        else:
            stack += vars(thing).values() if hasattr(thing, "__dict__") else ()
            stack += [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
            stack += [getattr(thing, name, None) for name in ("func", "args", "keywords", "__self__")]
    assert not copy.deepcopy(library).findings
    assert not pickle.loads(pickle.dumps(library)).findings


def test_few_findings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MAX_STEPS", 200)
    world = World()
    tiled = TiledModule(world.net, **world.options)
    library = tiled.engine.library
    first: set[Any] = set()
    for number in range(4):
        world.side = 24 + 4 * number
        world.step(tiled, number)
        first = first if number else set(library.findings)
        old = [found for found in library.findings.values() if found.last_run < library.runs - 1]
        assert sum(found.size for found in old) <= 200
    assert not first & set(library.findings)


def test_of_a_grid_of_many_tiles_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MAX_TILES", 3)
    world, library = World(), Library()
    for number in range(2):
        found, peak = world.step(of(world, library), number)
        expected, most = world.step(of(world, Library()), number)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and peak == most
    assert all(len(found.tiles) <= 3 and found.owned is None for found in library.findings.values())


def test_findings_are_not_all_looked_at_for_each_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    size = findings.Findings.size.fget
    monkeypatch.setattr(findings.Findings, "size", property(lambda self: looked.append(self) or size(self)))
    library, kept = Library(), 400
    for i in range(kept):
        library.evict()
        library.findings[i] = findings.Findings()
    assert len(looked) < 2 * findings.CHECK_EVERY * kept  # each for each would be 80,000


def again(case: Case, engine: Engine, watching: bool) -> list[int]:
    """Peaks of three steps."""
    peaks = []
    with thorough(watching):
        for _ in range(3):
            Step(case, engine)
            assert engine.ledger is not None
            peaks.append(engine.ledger.peak)
    return peaks


def agree(case: Case) -> None:
    one, other = copy.deepcopy(case.plan), copy.deepcopy(case.plan)
    assert isinstance(one, AnyPlan)
    torch.manual_seed(1)
    known = again(case, one, False)
    torch.manual_seed(1)
    assert known == again(case, other, True)


@pytest.mark.parametrize("fixed", [5, pytest.param(6, marks=pytest.mark.full)])
def test_what_is_known_of_a_pass_is_what_it_holds(fixed: int) -> None:
    @settings(max_examples=3, **QUIET)
    @given(cases())
    def every(case: Case) -> None:
        try:
            Step(case, None)
        except RuntimeError:
            return  # PyTorch refuses the network
        agree(case)

    seed(fixed)(every)()


def test_dropout_is_planned_once() -> None:
    """The key of its random numbers is another in each step, and no plan depends on it."""
    world = World(options={"budget": "48KiB"})
    tiled = TiledModule(world.net, **world.options)
    world.step(tiled, 0)
    plan = tiled.plan
    world.step(tiled, 1)
    assert tiled.plan is plan
