"""A search knows of a scan by its tile in the middle, most times."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.grids import row_grid
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.search.interval import AT_LEAST, Intervals, Where
from lightning_plugin.planner.search.policies import policy_of
from lightning_plugin.program.program import Program
from lightning_plugin.program.scan import middle_of_scan, scan
from tests.lightning_plugin.planner.test_grids import PICKS, larger
from tests.zoo import ZOO

INTERVALS = 4


def some(network: Network, draw: random.Random) -> Iterator[tuple[Intervals, int, int]]:
    """Some intervals of a network."""
    intervals = Intervals(network, rates_of("cpu"), policy_of("auto"))
    stages = [network.stage[n.serial] for n in network.order]
    for _ in range(INTERVALS):
        begin = draw.randrange(len(stages))
        last = max(i for i, stage in enumerate(stages) if stage == stages[begin])
        end = draw.randint(begin, last) + 1
        if intervals.program(begin, end) is not None:
            yield intervals, begin, end


def compare(program: Program, grid: Grid) -> None:
    """The tile in the middle is that of all tiles, and where there are none, there is no such tile."""
    try:
        tiles = scan(program, grid)
    except PlanError:
        with pytest.raises(PlanError):
            middle_of_scan(program, grid)
    else:
        assert middle_of_scan(program, grid) == tiles[len(tiles) // 2]


@pytest.mark.parametrize("name", sorted(ZOO.keys() - {PICKS}))
def test_the_tile_in_the_middle_is_known_by_its_neighbours(name: str) -> None:
    entry = ZOO[name]
    with recorded(entry.build().train(), larger(entry.shape), torch.float32) as (network, _):
        for intervals, begin, end in some(network, random.Random(name)):
            where = Where(begin, end)
            for grid in intervals.scan_grids(begin, end):
                compare(intervals.work_of(begin, end), grid)
                for backward in (False, True):
                    cost = intervals.scan_cost(where, grid, backward)
                    least, handed = intervals.scan_middle(where, grid, backward)
                    if cost is not None:
                        assert least <= cost.bytes and AT_LEAST * handed <= cost.carried


windows = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(windows, min_size=1, max_size=5), st.integers(90, 260), st.integers(2, 24))
def test_so_it_is_for_windows_of_all_kinds(layers: list[tuple[int, int, int, int]], height: int, count: int) -> None:
    """Kernels smaller than their strides among them, which leave rows out."""
    net = nn.Sequential(*(nn.Conv2d(2, 2, k, s, min(p, k // 2), d) for k, s, p, d in layers))
    try:
        net(torch.zeros(1, 2, height, 40))
    except RuntimeError:  # smaller than a kernel
        return
    with recorded(net, (1, 2, height, 40), torch.float32) as (network, _):
        intervals = Intervals(network, rates_of("cpu"), policy_of("auto"))
        end = 1 + max(i for i, node in enumerate(network.order) if node.outputs[0].is_map)
        extent = network.order[end - 1].outputs[0].space.extent
        if count <= extent[0]:
            compare(intervals.work_of(0, end), row_grid(extent, count))
