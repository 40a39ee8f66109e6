"""Plans of chains: real steps keep them, long ones are found as short ones are, and what is said of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import BudgetError, Plan, TiledModule, make_plan
from lightning_plugin.errors import PlanError
from lightning_plugin.ledger import Ledger
from lightning_plugin.planner import choose
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.rehearsal.rehearse import RehearsedMemory, rehearse
from lightning_plugin.strategy.feedback import count_tiles
from tests.exactness import TOLERANCE, difference

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Block(nn.Module):
    def __init__(self, channels: int, normed: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))


def network(count: int, channels: int = 4, normed: bool = False, more: int = 0) -> nn.Module:
    blocks = [Block(channels, normed) for _ in range(count)]
    last = [nn.Conv2d(channels, 6, 3, 2), *(Block(6, normed) for _ in range(more))] if more else []
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *blocks, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@st.composite
def budgets(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...], int]:
    """A network of one chain or two, an image, and a budget between very little and plenty."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels, count = draw(st.integers(1, 8)), draw(st.integers(4, 16))
    net = network(count, channels, draw(st.booleans()), draw(st.sampled_from([0, 0, 5]))).double()
    shape = (draw(st.integers(1, 2)), 3, draw(st.integers(20, 36)), draw(st.integers(20, 36)))
    one = shape[0] * channels * shape[2] * shape[3] * 8
    parameters = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
    return net, shape, int(parameters + draw(st.floats(5.0, 60.0)) * one + 30_000)


def step(net: nn.Module, shape: tuple[int, ...], budget: int, steps: int = 2, **options: Any) -> str:
    """Steps under a budget, the second with gradients there: exact, and within it. Or that they are refused."""
    plain, x = copy.deepcopy(net), torch.randn(shape, dtype=torch.float64)
    tiled = TiledModule(net, budget=budget, chains="always", **options)
    for _ in range(steps):
        try:
            loss = tiled(x).square().mean()
            loss.backward()
        except BudgetError as error:
            assert error.smallest > budget
            return "refused"
        expected = plain(x).square().mean()
        expected.backward()
        plan, ledger = tiled.plan, tiled.engine.ledger
        assert plan is not None and ledger is not None and plan.chains
        assert ledger.peak_bytes <= plan.peak_bytes <= budget
        assert difference(loss, expected) < TOLERANCE
        scale = max(q.grad.abs().max().item() for q in plain.parameters() if q.grad is not None)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert difference(p.grad, q.grad, 1e-3 * scale) < TOLERANCE
    return "kept" if all(c.kept == c.count for c in plan.chains) else "again"


@pytest.mark.slow
def test_a_step_holds_no_more_than_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @settings(max_examples=3, **QUIET)
    @seed(3)
    @given(budgets(), st.booleans())
    def every(drawn: tuple[nn.Module, tuple[int, ...], int], thorough: bool) -> None:
        monkeypatch.setattr(Ledger, "watch_all", thorough)
        seen.append(step(*drawn, disk=False))

    every()
    assert "again" in seen


@pytest.mark.slow
def test_the_smallest_budget_that_is_named_works() -> None:
    torch.manual_seed(0)
    net, shape = network(12).double(), (1, 3, 40, 44)
    with pytest.raises(BudgetError) as error:
        make_plan(net, shape, budget="100KiB", dtype=torch.float64, chains="always", disk=False)
    assert step(net, shape, error.value.smallest, steps=1, disk=False) == "again"


def test_a_frozen_network_is_planned_without_gradients() -> None:
    """What a plan says it holds is little more than what a step holds, where most of that is parameters."""
    torch.manual_seed(0)
    net = network(12, 48).double().requires_grad_(False)
    net[0].requires_grad_(True)
    weights, x = sum(p.nbytes for p in net.parameters()), torch.randn(1, 3, 16, 18, dtype=torch.float64)
    tiled = TiledModule(net, budget=2 * weights, chains="always", disk=False)
    tiled(x).square().mean().backward()
    assert tiled.plan is not None and tiled.plan.chains
    assert weights < tiled.peak_bytes <= tiled.plan.peak_bytes < tiled.peak_bytes + weights / 2


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["disk", pytest.param("host", marks=pytest.mark.full)])
def test_a_deep_network_whose_parameters_are_streamed(parameters: str) -> None:
    torch.manual_seed(0)
    net, shape = network(10, 40).double(), (1, 3, 20, 22)
    weights = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
    budget = int(0.4 * weights) + 14 * 40 * 440 * 8
    assert step(net, shape, budget, parameters=parameters) in ("again", "kept")


@pytest.mark.slow
def test_depth_makes_no_difference_to_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain ten times as long is planned with as many rehearsals, of as many links."""
    looked: dict[int, list[int]] = {}
    for count in (20, 200):
        seen: list[int] = []

        def counted(plan: Plan, network: Network, seen: list[int] = seen) -> RehearsedMemory:
            seen.append(len(network.order))
            return rehearse(plan, network)

        monkeypatch.setattr(choose, "rehearse", counted)
        room = 12 * 4 * 48 * 48 * 8 + 16 * sum(p.numel() for p in network(count).parameters())
        net = network(count).double()
        plan = make_plan(net, (1, 3, 48, 48), budget=room, dtype=torch.float64, chains="always", disk=False)
        monkeypatch.undo()
        assert [c.count for c in plan.chains] == [count] and plan.chains[0].kept < count
        looked[count] = seen
        assert len(plan.to_json()) < 6000
    assert len(looked[200]) <= len(looked[20]) + 4 and max(looked[200]) == max(looked[20]) < 20


@pytest.mark.slow
def test_memory_grows_like_the_logarithm_of_depth() -> None:
    """Beside parameters: with eight times the links, some slots more are enough for as few runs."""
    held = {}
    for count in (64, 512):
        net = network(count)
        parameters = 8 * sum(p.numel() for p in net.parameters())
        one = 4 * 32 * 32 * 4
        plan = make_plan(net, (1, 3, 32, 32), budget=parameters + 26 * one + 40_000, chains="always", disk=False)
        (chain,) = plan.chains
        assert chain.forecast.forwards <= 4 * count
        held[count] = plan.peak_bytes - parameters
    assert held[512] <= held[64] + 8 * one


def test_what_is_said_of_a_chain(tmp_path: Path) -> None:
    room = 8 * sum(p.numel() for p in network(30).parameters()) + 12 * 4 * 48 * 48 * 4
    plan = make_plan(network(30), (1, 3, 48, 48), budget=room, chains="always", disk=False)
    (chain,) = plan.chains
    (row,) = [line for line in str(plan).splitlines() if "chain of 30" in line]
    assert row.startswith("1.first … 30") and f"{chain.slots} slots" in row
    data = json.loads(plan.to_json())
    assert data["version"] == 1 and data["chains"][0]["count"] == 30 and len(data["chains"][0]["segments"]) == 1
    assert Plan.from_json(plan.to_json()) == plan
    plan.draw(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    again = TiledModule(network(30), plan=Plan.from_json(plan.to_json()))
    again(torch.randn(1, 3, 48, 48)).square().mean().backward()
    assert again.plan == plan


@pytest.mark.parametrize("maps", [pytest.param(12, marks=pytest.mark.full), 30, 200])
def test_a_step_tells_of_as_many_tiles_as_its_plan_has(maps: int) -> None:
    """Links in tiles, links that run whole and again, and links that are kept."""

    class Heard:
        tiles = 0

        def on_tiles(self, count: int) -> None:
            self.tiles += count

        def on_identical_tiles(self, count: int) -> None: ...
        def on_wait(self, kind: Any, seconds: float) -> None: ...

    net, heard = network(40), Heard()
    budget = 8 * sum(p.numel() for p in net.parameters()) + maps * 4 * 48 * 48 * 4
    tiled = TiledModule(net, budget=budget, chains="always", disk=False)
    tiled.engine.progress.listeners.append(heard)
    tiled(torch.randn(1, 3, 48, 48)).square().mean().backward()
    assert tiled.plan is not None and tiled.plan.chains
    assert heard.tiles == count_tiles(tiled.plan, grad=True) > 0


def test_a_plan_of_another_chain_is_refused() -> None:
    room = 8 * sum(p.numel() for p in network(30).parameters()) + 12 * 4 * 48 * 48 * 4
    plan = make_plan(network(30), (1, 3, 48, 48), budget=room, chains="always", disk=False)
    image = torch.randn(1, 3, 48, 48)
    with pytest.raises(PlanError, match=r"chain 0 of the plan is node \d+, of 30 links; in this network that is"):
        TiledModule(network(31), plan=plan)(image).sum().item()
    with pytest.raises(PlanError, match="a chain of 30 links has 0 slots or more and keeps 0 to 30"):
        Plan.from_json(plan.to_json().replace('"kept": 0', '"kept": 31'))


@pytest.mark.parametrize("chains, links", [("auto", 0), ("never", 0), ("always", 20)])
def test_who_says_whether_there_are_chains(chains: Any, links: int) -> None:
    """Where a network is not deep, nobody needs them."""
    plan = make_plan(network(20), (1, 3, 32, 32), budget="8MiB", chains=chains)
    assert sum(c.count for c in plan.chains) == links
    with pytest.raises(ValueError, match="chains='perhaps': give 'auto', 'always', 'never'"):
        make_plan(network(20), (1, 3, 32, 32), budget="8MiB", chains="perhaps")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_network_of_thousands_of_operators_has_chains_by_itself() -> None:
    plan = make_plan(network(600), (1, 3, 16, 16), budget="8MiB")
    assert [c.count for c in plan.chains] == [600]
