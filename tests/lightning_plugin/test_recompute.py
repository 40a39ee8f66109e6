"""Boundaries that are let go after forward and made again in backward: the same results, for less memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, PlanError, TiledModule, materialize
from lightning_plugin.engine import Engine
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute import function
from lightning_plugin.execute.function import Recompute
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.plans import Planner
from lightning_plugin.residency.boundary import Boundary
from tests.exactness import TOLERANCE, assert_exact, difference
from tests.lightning_plugin.outside import account
from tests.zoo import fill


class Dropping(Engine):
    """All boundaries stored, and those of segments dropped as deep as ``drop`` says by place (all, where it says
    nothing)."""

    def __init__(self, drop: Sequence[int] | None = None) -> None:
        super().__init__(Planner(Options(tiles=(3, 2), backward_tiles=(2, 3))))
        self.drop = drop

    def choose(self, recording: Any) -> Plan:
        plan = super().choose(recording)
        count = len(plan.segments)
        drop = [1] * count if self.drop is None else [*self.drop, *[0] * count][:count]
        return replace(plan, segments=tuple(replace(s, drop=d) for s, d in zip(plan.segments, drop, strict=True)))


def chain(depth: int = 5, width: int = 4) -> nn.Sequential:
    """A network in which each train-mode BatchNorm needs the whole of what comes before it."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Skip(nn.Module):
    """A map that is read at once and once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = chain(2), nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *chain(2)[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.middle(x) * x


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the segments that were run again, in order."""
    places: list[int] = []

    class Counted(Recompute):
        def __call__(self, deepest: int) -> None:
            super().__call__(deepest)
            places.append(self.run.place)

    monkeypatch.setattr(function, "Recompute", Counted)
    return places


@pytest.mark.parametrize("drop", [None, (1,), (0, 1, 1), (1, 0, 1, 1)])
@pytest.mark.parametrize("make", [chain, Skip])
def test_what_is_dropped_is_made_again(make: Any, drop: Sequence[int] | None, made: list[int]) -> None:
    assert_exact(make(), (2, 3, 21, 17), engine=Dropping(drop))
    assert made, "nothing was made again"
    assert len(made) == len(set(made)), "made more than once"


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        # Backward needs 7, on whose way 2 and 5 stay; then the runs before each of those.
        ((2, 2, 1, 2, 2, 1, 2, 2), [0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 0, 1]),
        ((2, 1, 0, 2, 1), [3, 4, 3, 0, 1, 0]),
        ((3, 2, 3, 1, 2), [0, 1, 2, 3, 4, 0, 1, 2, 0]),
        # Nothing is dropped less deeply: depth is no matter.
        ((5, 5, 5), [0, 1, 2]),
        ((1, 2, 3), [0, 1, 2]),
        ((3, 2, 1), [0, 1, 2, 0, 1, 0]),
    ],
)
def test_what_is_dropped_deeper_is_made_as_often_as_it_takes(
    drop: Sequence[int], expected: list[int], made: list[int]
) -> None:
    net = chain(9)
    rates = rates_of("cpu")
    with recorded(net, (1, 3, 21, 17), torch.float32) as (network, _):
        plan = Dropping(drop).choose(network.recording)
        stored = replace(plan, segments=tuple(replace(s, drop=0) for s in plan.segments))
        passes = {
            place: predict(drop_one(stored, place), network, rates) - predict(stored, network, rates)
            for place in set(expected)
        }
        cost = predict(plan, network, rates) - predict(stored, network, rates)
    assert cost == pytest.approx(sum(passes[place] for place in expected))
    assert_exact(net, (1, 3, 21, 17), engine=Dropping(drop))
    assert made == expected


def drop_one(plan: Plan, place: int) -> Plan:
    return replace(plan, segments=tuple(replace(s, drop=int(i == place)) for i, s in enumerate(plan.segments)))


def test_a_step_holds_less_and_leaves_nothing() -> None:
    net, x = chain(16), torch.randn(1, 3, 64, 64)
    drops = {
        "stored": (),
        "dropped": (1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1),
        "deeper": (2, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 1, 2, 1),
    }
    peaks = {}
    for name, drop in drops.items():
        net.zero_grad(set_to_none=True)
        engine = Dropping(drop)
        found = account(lambda: net(LazyImage.from_tensor(x, engine=engine)).sum().backward(), net)  # noqa: B023
        peaks[name] = found.held
        assert found.left <= 3 * 4 * sum(p.numel() for p in net.parameters()) + 4096
    assert peaks["dropped"] < 0.5 * peaks["stored"]
    assert peaks["deeper"] < 0.9 * peaks["dropped"]


def test_a_step_can_go_back_twice() -> None:
    torch.manual_seed(0)
    net, x = chain().double(), torch.randn(1, 3, 15, 14, dtype=torch.float64)
    loss = net(LazyImage.from_tensor(x, engine=Dropping())).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
    loss.backward()
    for p, g in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_a_parameter_that_was_changed_meanwhile_is_refused() -> None:
    net = chain()
    loss = net(LazyImage.from_tensor(torch.randn(1, 3, 15, 14), engine=Dropping())).square().sum()
    assert torch.isfinite(loss)
    with torch.no_grad():
        net[0].weight.add_(1)
    with pytest.raises(RecordingError, match="changed in place before backward"):
        loss.backward()


def test_a_step_that_never_goes_back_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[weakref.ref[Boundary]] = []
    before = Boundary.__init__

    def noted(self: Boundary, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        handles.append(weakref.ref(self))

    monkeypatch.setattr(Boundary, "__init__", noted)
    loss = chain()(LazyImage.from_tensor(torch.randn(1, 3, 15, 14), engine=Dropping())).sum()
    assert torch.isfinite(loss)
    assert handles
    del loss
    assert not [h for h in handles if h() is not None], "a cycle waits for the garbage collector"


def test_only_what_can_be_made_again_may_be_dropped() -> None:
    plan = TiledModule(chain(), budget="1MiB")
    plan(torch.randn(1, 3, 32, 32))
    assert plan.plan is not None
    tiled = next(s for s in plan.plan.segments)
    with pytest.raises(PlanError, match="drop needs"):
        replace(tiled, keep=False, drop=1, tier="disk")
    with pytest.raises(PlanError, match="0 \\(not at all\\) or more, not -1"):
        replace(tiled, keep=False, drop=-1)


class Pools(nn.Module):
    """Two results of one map: by a small map with all axes, and by one with rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x).tanh()
        small = F.avg_pool2d(h, 16)
        spread = (small - small.mean((2, 3), keepdim=True)).square().mean()
        return spread, self.out(self.norm(F.avg_pool2d(h, (1, 128)))).square().mean()


def test_of_several_dropped_maps_on_background_one_is_made_again() -> None:
    """Identical tiles are looked for anew: fewer tiles have a share in the one that is still wanted."""
    plain = fill(Pools().double())
    x = torch.zeros(1, 3, 128, 128, dtype=torch.float64)
    x[:, :, 40:60, 8:20] = torch.randn(1, 3, 20, 12, dtype=torch.float64)
    plain(x)[1].backward()

    def step(tiled: TiledModule) -> None:
        spread, loss = tiled(LazyImage.from_tensor(x))
        assert (spread + loss).item() > 0
        wanted = materialize(loss)
        del spread, loss
        wanted.backward()

    first = TiledModule(copy.deepcopy(plain), tiles=8)
    step(first)
    assert first.plan is not None
    dropped = replace(first.plan, segments=(replace(first.plan.segments[0], drop=1), *first.plan.segments[1:]))
    module = copy.deepcopy(plain)
    module.zero_grad()
    step(TiledModule(module, plan=dropped))
    for p, q in zip(plain.parameters(), module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and difference(q.grad, p.grad, 1e-3) < TOLERANCE
