"""Scans are found node by node for all intervals with one end; here each is found again by itself, tile by tile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.grids import row_grid
from lightning_plugin.planner.costs.rates import rates_of
from lightning_plugin.planner.costs.scans import Scans, held
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.policies import AUTO
from lightning_plugin.program.program import Program
from lightning_plugin.program.scan import scan_tiles
from tests.sampling import sampled
from tests.zoo import ZOO

#: A network that picks instances by their values, and so is not recorded without pixels.
PICKS = "mil_class_attention"
#: Ends of intervals of each network, and beginnings of each end.
ENDS, BEGINNINGS = 3, 3


def larger(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whose maps may be cut into many tiles."""
    batch, channels, *sides = shape
    return (batch, channels, *(side * (2 if len(sides) > 2 else 8) for side in sides))


class Tile:
    """One tile: the boxes of what it needs, computes, is handed and keeps, by the serial of the node."""

    def __init__(self) -> None:
        self.need: dict[Value, Box] = {}
        self.whole: dict[int, Box] = {}
        self.fresh: dict[int, Box] = {}
        self.carried: dict[int, Box] = {}
        self.kept: dict[int, Box] = {}


def tile_by_tile(program: Program, grid: Grid) -> list[Tile]:
    """A scan along the axis that a grid cuts, or the first."""
    axis = next((a for a, count in enumerate(grid.counts) if count > 1), 0)
    tiles, done = [], dict.fromkeys((n.serial for n in program.nodes), 0)
    for boxes in program.owned(grid):
        tile, reduced = Tile(), {}
        for target, box in zip(program.targets, boxes, strict=True):
            if target.stored is None:
                reduced[target.node.serial] = box
            elif not box.empty:
                tile.need[target.stored] = box
        for node in reversed(program.nodes):
            if isinstance(node.op, ReduceOp):
                rows = reduced[node.serial]
            else:
                need = tile.need.get(node.outputs[0])
                if need is None:
                    continue
                tile.whole[node.serial] = need
                rows = need.replace(axis, max(need.lo[axis], done[node.serial]), need.hi[axis])
                if not rows.empty:
                    tile.fresh[node.serial] = rows
            if not rows.empty:
                for v, read in zip(node.maps, node.op.need(rows), strict=True):  # type: ignore[attr-defined]
                    tile.need[v] = tile.need[v].hull(read) if v in tile.need else read
        for serial, rows in tile.fresh.items():
            done[serial] = rows.hi[axis]
        tiles.append(tile)
    for i, tile in enumerate(tiles):
        tile.carried = tiles[i - 1].kept if i else {}
        for node in program.nodes:
            parts = [p[node.serial] for p in (tile.carried, tile.fresh) if node.serial in p]
            if not parts:
                assert node.serial not in tile.whole
                continue
            there = parts[0] if len(parts) == 1 else parts[0].hull(parts[1])
            if node.serial in tile.whole and not there.contains(tile.whole[node.serial]):
                raise PlanError("not in order")
            rows_later = [t.whole[node.serial].lo[axis] for t in tiles[i + 1 :] if node.serial in t.whole]
            if rows_later and min(rows_later) < there.hi[axis]:
                tile.kept[node.serial] = there.replace(axis, max(there.lo[axis], min(rows_later)), there.hi[axis])
    return tiles


def compare(program: Program, grid: Grid, shared: Scans | None = None) -> None:
    """A scan of a segment, and what is known of it with others of the same end, against the same tile by tile."""
    try:
        given = scan_tiles(program, grid)
    except PlanError:
        with pytest.raises((PlanError, AssertionError)):
            tile_by_tile(program, grid)
        with pytest.raises(PlanError):
            (shared or Scans(program, grid)).parts(program)
        return
    tiles = tile_by_tile(program, grid)
    assert len(given) == len(tiles)
    for mine, tile in zip(given, tiles, strict=True):
        assert mine.reads == {v: tile.need[v] for v in program.reads if v in tile.need}
        assert (mine.fresh, mine.carried, mine.kept) == (tile.fresh, tile.carried, tile.kept)
    scans = shared or Scans(program, grid)
    parts = scans.parts(program)
    for i, number in enumerate(scans.samples):
        tile = given[number]
        assert held(program, parts, i) == {
            **tile.reads,
            **{n.outputs[0]: tile.held(n.serial) for n in program.nodes
               if n.serial in tile.fresh or n.serial in tile.carried},
        }  # fmt: skip
    for node, part in zip(program.nodes, parts, strict=True):
        if isinstance(node.op, ReduceOp):
            continue
        out = node.outputs[0]
        whole = Box.whole(out.space.extent).positions
        assert part.share == sum(t.fresh[node.serial].positions for t in tiles if node.serial in t.fresh) / whole
        kept = [t.kept[node.serial].positions if node.serial in t.kept else 0 for t in tiles]
        assert part.kept == tuple(out.bytes * positions // whole for positions in kept)


def some(network: Network, draw: random.Random) -> Iterator[list[tuple[int, int]]]:
    """Some intervals of a network, those with one end together, in any order."""
    stages = [network.stage[n.serial] for n in network.order]
    for _ in range(ENDS):
        end = draw.randrange(len(stages)) + 1
        first = min(i for i, stage in enumerate(stages) if stage == stages[end - 1])
        yield [(draw.randrange(first, end), end) for _ in range(BEGINNINGS)]


@pytest.mark.parametrize(("name",), sampled(sorted(ZOO.keys() - {PICKS}), every=6))
def test_scans_with_one_end_are_what_each_is_alone(name: str) -> None:
    entry, draw = ZOO[name], random.Random(name)
    with recorded(entry.build().train(), larger(entry.shape), torch.float32) as (network, _):
        intervals = Intervals(network, rates_of("cpu"), AUTO)
        for together in some(network, draw):
            for begin, end in together:
                program = intervals.program(begin, end)
                grids = [] if program is None else intervals.scan_grids(begin, end)
                for grid in draw.sample(grids, min(2, len(grids))):
                    shared = intervals.scans_of(begin, end, grid)
                    compare(intervals.program_of(begin, end), grid, shared)


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
        intervals = Intervals(network, rates_of("cpu"), AUTO)
        end = 1 + max(i for i, node in enumerate(network.order) if node.outputs[0].is_map)
        extent = network.order[end - 1].outputs[0].space.extent
        for begin in reversed(range(end)):
            if count <= extent[0]:
                grid = row_grid(extent, count)
                compare(intervals.program_of(begin, end), grid, intervals.scans_of(begin, end, grid))
