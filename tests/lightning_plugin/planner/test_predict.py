"""What the cost model says of the time of a plan, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.published import POLICIES
from lightning_plugin.boxes import Grid
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.costs.rates import FAR, NEAR, RATES, Rates
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.planner.search.search import Search
from lightning_plugin.program.fixed import fixed_plan

CPU = RATES["cpu"]


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(True), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


@contextmanager
def network(width: int = 8, side: int = 96) -> Iterator[Network]:
    with recorded(net(width), (1, 3, side, side), torch.float32) as (found, _):
        yield found


@pytest.mark.parametrize("policy", ["auto", "overl-h", "2ps-h", "checkpoint_sequential"])
@pytest.mark.parametrize("share", [0.3, 0.6, 2.0])
def test_a_plan_of_a_search_is_predicted_to_take_what_the_search_said(policy: str, share: float) -> None:
    with network() as found:
        budget = found.fixed_bytes + int(share * found.plain_bytes)
        plan = Search(found, CPU, lower_tiers(None, Options()), POLICIES[policy]).run(budget)
        if plan is None:
            assert policy != "auto" and share < 2
        else:
            assert predict(plan, found, CPU) == pytest.approx(plan.seconds)


def test_a_plan_without_a_way_back_is_predicted_alike() -> None:
    with recorded(net().requires_grad_(False), (1, 3, 96, 96), torch.float32) as (found, _):
        assert not found.trains
        plan = Search(found, CPU, lower_tiers(None, Options())).run(found.fixed_bytes + found.plain_bytes // 4)
        assert plan is not None and not any(s.keep for s in plan.segments)
        assert predict(plan, found, CPU) == pytest.approx(plan.seconds)


def test_every_tile_reads_the_weights_and_adds_to_their_gradients() -> None:
    """Where halos cost little, tiles cost what the weights cost: much in a wide network, little in a narrow one."""
    free_arithmetic = replace(CPU, flops=1e18, call=1e-12)
    for width, least, most in ((4, 1.0, 1.3), (256, 1.5, 50.0)):
        with network(width, 32) as found:
            one, many = (predict(fixed_plan(found.nodes, Grid((n, 1))), found, free_arithmetic) for n in (1, 8))
        assert least < many / one < most


def test_large_maps_cost_more_for_a_byte_than_small_ones() -> None:
    costs = [CPU.byte(size, CPU.memory) for size in (0, NEAR, (NEAR + FAR) // 2, FAR, 4 * FAR)]
    assert costs == sorted(costs) and costs[0] == 1 / CPU.near and costs[-1] == 1 / CPU.memory


def test_rates_without_the_finer_figures_are_as_memory_says() -> None:
    plain = Rates(flops=1e12, memory=1e10, host=1e9, disk=1e9, call=1e-6)
    assert plain.near == plain.reorder == plain.pool == 1e10
    assert plain.byte(1, plain.memory) == plain.byte(1 << 40, plain.memory) == 1e-10


def test_what_is_dropped_is_predicted_to_be_made_twice() -> None:
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)]
    deep = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
    with recorded(deep, (1, 3, 96, 96), torch.float32) as (found, _):
        search = Search(found, CPU, lower_tiers(None, Options(disk=False)))
        budget = next(b for b in range(found.fixed_bytes, 1 << 30, 1 << 17) if search.run(b) is not None)
        plan = search.run(budget)
        assert plan is not None and any(s.drop for s in plan.segments)
        assert predict(plan, found, CPU) == pytest.approx(plan.seconds)
        stored = replace(plan, segments=tuple(replace(s, drop=0) for s in plan.segments))
        assert predict(stored, found, CPU) < predict(plan, found, CPU)


class Corner(nn.Module):
    """Convolutions of which one position is read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, :, 0, 0]


def test_tiles_that_compute_less_than_plain_recompute_nothing() -> None:
    with recorded(Corner(), (1, 3, 64, 64), torch.float32) as (found, _):
        plan = Search(found, CPU, lower_tiers(None, Options()), POLICIES["overl"]).run(found.fixed_bytes * 100)
        assert plan is not None and not all(s.keep for s in plan.segments)
        assert plan.recompute == 0.0 and all(s.forecast.recompute == 0.0 for s in plan.segments)
