"""Repeated blocks are one entry of the search, of profiles and of rehearsals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TileSource
from lightning_plugin.boxes import Box
from lightning_plugin.graph import ancestors
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import Chooser
from lightning_plugin.planner.costs.lower import LowerTiers
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.overhead import source_key
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from lightning_plugin.planner.search.interval import Intervals
from tests.lightning_plugin.networks import AnyPlan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


def chain(blocks: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *(Block(4) for _ in range(blocks)))


def costed(blocks: int, part: float) -> tuple[int, int]:
    """How many operators, and intervals, a search has looked at."""
    with recorded(chain(blocks), (1, 3, 96, 90), torch.float32) as (network, _):
        chooser = Chooser(network, rates_of("cpu"), LowerTiers())
        chooser.choose(int(network.fixed_bytes + part * network.plain_bytes) + 100_000)
        return len(set(network.profiles.values())), len(chooser.search.intervals.first_of_key)


@pytest.mark.parametrize("part", [0.2, 2])
def test_four_times_the_blocks_cost_no_more_intervals(part: float) -> None:
    assert costed(16, part) == costed(4, part)


def rehearsed(blocks: int) -> tuple[int, int]:
    """How many passes are run, and programs looked at, in a rehearsal of one grid everywhere."""
    with recorded(chain(blocks), (1, 3, 96, 90), torch.float32) as (network, _):
        plan = AnyPlan(grids=((3, 2),)).choose(network.recording)
        network = Network(network.recording)
        rehearse(plan, network)
        passes = sum(len(found.pass_bytes) for found in network.library.findings.values())
        return passes, len(network.repeats.found)


def test_four_times_the_blocks_rehearse_no_more_passes() -> None:
    assert rehearsed(24) == rehearsed(6)


def looks(net: nn.Module) -> list[object]:
    """What the intervals between neighbouring cuts look like."""
    with recorded(net, (1, 3, 24, 20), torch.float32) as (network, _):
        return [network.repeats.number(n) for n in network.order]


def test_what_differs_in_anything_looks_different() -> None:
    def pair(one: nn.Module, other: nn.Module) -> bool:
        first, second = looks(nn.Sequential(nn.Conv2d(3, 4, 1), one, other))[1:3]
        return first == second

    assert pair(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    assert not pair(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2))
    assert not pair(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False))
    assert not pair(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2))
    assert not pair(nn.ReLU(), nn.ReLU(inplace=True))
    assert not pair(nn.LeakyReLU(0.1), nn.LeakyReLU(0.2))


def test_where_an_image_lies_makes_a_difference() -> None:
    """What is read ahead, or from elsewhere, takes room: such intervals cost something else."""

    class FakeHostMap(TileSource):
        shape, dtype = (1, 3, 24, 20), torch.float32

        def read(self, box: Box) -> Tensor:
            return torch.zeros(1, 3, *box.extent)

    found = []
    for image in (torch.zeros(FakeHostMap.shape), FakeHostMap()):
        lazy = LazyImage(image)
        (source,) = [n.outputs[0] for n in ancestors([lazy._value])]
        found.append(source_key(source))
    assert len(set(found)) == 2 and None not in found


class Unrepeated(Intervals):
    """Costs each interval by itself."""

    def first(self, begin: int, end: int) -> tuple[int, int]:
        return begin, end


@pytest.mark.parametrize("part", [0.1, 0.3, 0.7])
def test_an_interval_costs_what_the_first_like_it_does(part: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), *(Block(4) for _ in range(5)), nn.MaxPool2d(2), Block(4))
    with recorded(net, (1, 3, 96, 90), torch.float32) as (network, _):
        plans = []
        for kind in (Intervals, Unrepeated):
            chooser = Chooser(Network(network.recording), rates_of("cuda:a100"), LowerTiers(1 << 30))
            intervals = kind(chooser.network, chooser.rates, chooser.policy)
            chooser.search.intervals = chooser.search.ways.intervals = intervals
            plans.append(chooser.choose(int(network.fixed_bytes + part * network.plain_bytes) + 100_000))
        assert plans[0] == plans[1] and plans[0].forecast == plans[1].forecast
