"""The host's memory is not asked for more than the user allows: counted where maps are made, beside the planner."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import lightning_plugin.residency.tiers
from lightning_plugin import BudgetError, TiledModule
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import choose_plan, choose_recipe
from lightning_plugin.planner.costs.lower import LowerTiers, lower_tiers
from lightning_plugin.planner.costs.rates import RATES
from lightning_plugin.planner.recipe import retiered
from lightning_plugin.planner.search.policies import AUTO
from lightning_plugin.residency.tiers import HostMemory

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
#: A device whose host is fast beside it, so that much leaves it.
RATES_OF_DEVICE = RATES["cuda:a100"]


def block(size: int) -> int:
    """The block that PyTorch's allocator of pinned memory takes for a tensor."""
    taken = 1
    while taken < size:
        taken *= 2
    return taken


class Watched:
    """The bytes of the blocks that maps on the host lie in, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def make(self, *args: Any) -> HostMemory:
        made = HostMemory(*args)
        self.now += block(made.data.nbytes)
        self.most = max(self.most, self.now)
        weakref.finalize(made, self.gone, block(made.data.nbytes))
        return made

    def gone(self, size: int) -> None:
        self.now -= size


@pytest.fixture(scope="module")
def host() -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched()
        patch.setattr(lightning_plugin.residency.tiers, "HostMemory", watched.make)
        yield watched


class Skip(nn.Module):
    """Adds what it was given to what is made of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


LAYERS: dict[str, Any] = {
    "conv": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "norm": lambda: nn.BatchNorm2d(6),
    "skip": lambda: Skip(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1))),
    "tanh": lambda: nn.Tanh(),
    "pool": lambda: nn.MaxPool2d(3, 2, 1),
    "wide": lambda: nn.Conv2d(6, 6, 7, padding=3),
}


def net(names: list[str]) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), *(LAYERS[n]() for n in names)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def ran(plan: Plan, module: nn.Module, size: tuple[int, int], host: Watched, calls: int = 1) -> int:
    """The most bytes on the host in a step by a plan. On a CPU they count as the device's, over its budget."""
    tiled = TiledModule(module, plan=replace(plan, budget=None))
    host.most = host.now = 0
    losses = [tiled(torch.rand(1, 3, *size)).sum() for _ in range(calls)]
    torch.stack(losses).sum().backward()
    return host.most


def planned(network: Network, share: float, lower: LowerTiers) -> Plan | None:
    budget = network.fixed_bytes + int(share * network.plain_bytes)
    try:
        return choose_plan(network, RATES_OF_DEVICE, max(budget, 1 << 20), lower, AUTO, lower.calls)
    except BudgetError:
        return None


def on_host(plan: Plan) -> int:
    return sum(segment.tier == "host" for segment in plan.segments)


def every(examples: int, fixed: int | None, host: Watched) -> int:
    """Plans of networks drawn, with so much of a host; of how many steps the host held something."""
    found = 0

    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(
        st.lists(st.sampled_from(list(LAYERS)), min_size=2, max_size=6),
        st.tuples(st.integers(130, 260), st.integers(130, 260)),
        st.floats(0.1, 0.5),
        st.floats(0.1, 1.2),
        st.integers(1, 3),
    )
    def one(names: list[str], size: tuple[int, int], share: float, part: float, calls: int) -> None:
        nonlocal found
        module = net(names)
        with recorded(module, (1, 3, *size), torch.float32) as (network, _):
            room = int(part * network.plain_bytes)
            plan = planned(network, share, LowerTiers(room, calls=calls))
            again = None if plan is None else retiered(plan, network, LowerTiers(room, calls=calls))
        if plan is None:
            return
        assert again == plan, "what a search puts on the host is what fits there, segment by segment"
        most = ran(plan, module, size, host, calls)
        assert most <= room, (names, size, on_host(plan))
        assert bool(most) == bool(on_host(plan))
        found += bool(most)

    (seed(fixed)(one) if fixed is not None else one)()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [0, None])
def test_the_host_holds_no_more_than_it_may(fixed: int | None, host: Watched) -> None:
    """A quarter of the networks or more have maps there: of four it may be none, of forty hardly."""
    assert any(every(4, None if fixed is None else fixed + i, host) for i in range(10))


@pytest.mark.full
def test_the_host_holds_no_more_than_it_may_in_a_hundred_networks(host: Watched) -> None:
    assert every(100, 1, host) >= 25


@pytest.mark.slow
def test_maps_go_to_the_disk_where_a_larger_image_leaves_no_room_on_the_host(host: Watched) -> None:
    """And to the host again where a smaller one leaves some."""
    module = net(["norm", "conv", "norm", "conv", "norm", "conv", "norm"])
    with recorded(module, (1, 3, 220, 230), torch.float32) as (network, _):
        budget = network.fixed_bytes + network.plain_bytes // 5
        whole = choose_plan(network, RATES_OF_DEVICE, budget, LowerTiers(1 << 40))
        needs = ran(whole, module, (220, 230), host)
        lower = LowerTiers(int(0.8 * needs))
        recipe = choose_recipe(network, RATES_OF_DEVICE, budget, lower)
    assert {"host", "disk"} <= {s.tier for s in recipe.plan.segments}
    tiers = []
    for size in [(208, 218), (236, 240), (150, 160)]:
        with recorded(module, (1, 3, *size), torch.float32) as (network, _):
            plan = recipe.at(network, lower)
            assert plan is not None
        tiers.append(on_host(plan))
        assert ran(plan, module, size, host) <= lower.host
    assert tiers[2] > tiers[0] >= on_host(recipe.plan) >= tiers[1]
    with recorded(module, (1, 3, 240, 250), torch.float32) as (network, _):
        assert recipe.at(network, LowerTiers(lower.host, disk=False)) is None


@pytest.mark.slow
def test_parameters_on_the_host_leave_less_room_for_maps() -> None:
    """And so do calls that wait for one backward."""
    blocks = [block for _ in range(5) for block in (nn.Conv2d(96, 96, 3, padding=1), nn.BatchNorm2d(96))]
    ends = nn.Conv2d(96, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    with recorded(nn.Sequential(nn.Conv2d(3, 96, 3), *blocks, *ends), (1, 3, 98, 98), torch.float32) as (network, _):

        def plan(host: int, calls: int = 1) -> Plan:
            lower = LowerTiers(host, parameters=("host",), calls=calls)
            return choose_plan(network, RATES_OF_DEVICE, 5 << 19, lower)

        ample = plan(1 << 40)
        assert ample.on_host and on_host(ample)
        streamed = sum(network.resident_bytes(network.nodes[place].outputs[0]) for place in ample.on_host)
        maps = sum(s.forecast.stored_bytes for s in ample.segments if s.tier == "host")
        assert on_host(plan(streamed + 3 * maps)) == on_host(ample) > on_host(plan(streamed + maps // 2))
        assert on_host(plan(streamed + 3 * maps, calls=4)) < on_host(ample)
    assert lower_tiers("cuda", Options(calls=3)).calls == 3
