"""Cost of an interval of the order as one segment, on the grid that fits: tiled, scanned or kept."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from functools import cached_property

from lightning_plugin.boxes import Grid, nonempty_pieces
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.planner.analysis.background import ALL
from lightning_plugin.planner.analysis.network import Network, cotangent_bytes, is_given
from lightning_plugin.planner.costs.cost import Cost, CostModel
from lightning_plugin.planner.costs.grids import COUNTS, SCANS, SampleTiles, image_counts, nested, row_grid
from lightning_plugin.planner.costs.peak import TiledInterval, reads_copy
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans
from lightning_plugin.planner.overhead import memoized
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.pieces import UncutAxis
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.scan import can_scan_parts


class Intervals:
    """The intervals of one network."""

    def __init__(self, network: Network, rates: Rates, policy: Policy) -> None:
        self.network = network
        self.rates = rates
        self.policy = policy
        self.cost_model = CostModel(network, rates)
        self.space = network.axes_of_space
        #: The first interval of each program's key.
        self.first_of_key: dict[Hashable, tuple[int, int]] = {}
        self._scans: dict[tuple[int, Grid, tuple[int, ...]], Scans] = {}

    @memoized
    def stored_at(self, begin: int, end: int) -> list[Value]:
        """The maps that a tiled segment stores: made in it, and read after it or gathered."""
        network = self.network
        made = {v for n in network.order[begin:end] for v in n.outputs if v.is_map}
        alive = dict.fromkeys(v for v in network.alive[end] if v in made)
        for n in network.order[begin:end]:
            for v in n.outputs:
                if v.is_map and v in network.gathered:
                    alive[v] = None
        return list(alive)

    @memoized
    def alive(self, cut: int) -> frozenset[Value]:
        """The maps that are alive at a cut."""
        return frozenset(self.network.alive[cut])

    @memoized
    def program(self, begin: int, end: int) -> Program | None:
        """The tiled program of an interval; None if it makes nothing that is stored."""
        network = self.network
        stored = set(self.stored_at(begin, end))
        targets = []
        for n in network.order[begin:end]:
            if isinstance(n.op, ReduceOp):
                targets.append(Target(n))
            elif n.outputs[0] in stored:
                targets.append(Target(n, n.outputs[0]))
        if not targets:
            return None
        made = network.made
        return Program.build(targets, lambda v: v in made and made[v] < begin)

    @memoized
    def reads_and_trains(self, begin: int, end: int) -> tuple[frozenset[Value], bool]:
        """The maps that an interval reads, and whether any of its results requires grad."""
        program = self.program_of(begin, end)
        return frozenset(program.reads), any(t.requires_grad for t in program.targets)

    @memoized
    def first_places(self, begin: int, end: int) -> tuple[int, int]:
        """The first interval with the same program, which costs the same; see [Note: repeats] in `overhead`."""
        return self.first_of_key.setdefault(self.network.repeats.program_key(self.program_of(begin, end)), (begin, end))

    @memoized
    def first_equal(self, interval: TiledInterval) -> TiledInterval:
        """The first interval with the same program, and its maps on the same tiers. An interval that shares background
        is costed by itself."""
        if self.shares_background(interval):
            return interval
        begin, end = self.first_places(interval.begin, interval.end)
        if (begin, end) == (interval.begin, interval.end):
            return interval
        pairs = zip(self.program_of(interval.begin, interval.end).reads, self.program_of(begin, end).reads, strict=True)
        reads = frozenset(there for here, there in pairs if here in interval.reads)
        return interval._replace(begin=begin, end=end, reads=reads)

    def program_of(self, begin: int, end: int) -> Program:
        """The tiled program of an interval that has one."""
        program = self.program(begin, end)
        assert program is not None
        return program

    # Grids

    @memoized
    def grids(self, begin: int, end: int, shared: bool) -> list[Grid]:
        """Grids from coarse to fine: first fewer images at a time, which costs no halo; then rows, or tiles about as
        high as wide. If background is ``shared``, the tiles of one segment are nested in another's."""
        reference = self.program_of(begin, end).reference
        if self.policy.shape == "whole":
            return [Grid((1,) * len(reference))]
        if self.policy.shape == "rows":
            return [row_grid(reference, count) for count in COUNTS if count <= reference[0]]
        space = len(reference) if self.space is None else min(self.space, len(reference))
        inner, images = reference[:space], reference[space:]
        among = image_counts(images)
        if shared:
            return nested(inner, images, among)
        found = [Grid((*(1 for _ in inner), *counts)) for counts in among]
        longest = max(inner, default=1)
        for count in COUNTS:
            if count > longest:
                break
            side = longest / count
            counts = tuple(nonempty_pieces(size, max(1, round(size / side))) for size in inner)
            rows = (counts[0], *(1 for _ in counts[1:])) if counts else ()
            for cut in (rows, counts) if count in (2, 3) else (counts,):
                grid = Grid((*cut, *among[-1]))
                if grid not in found:
                    found.append(grid)
        return found

    # Costs

    @memoized
    def sample_tiles(self, begin: int, end: int, grid: Grid) -> SampleTiles:
        return SampleTiles(self.program_of(begin, end), grid)

    def strips(self, begin: int, end: int) -> Mapping[Value, UncutAxis]:
        """The maps that an interval can read piece by piece."""
        return self.cost_model.strips(self.program_of(begin, end))

    @memoized
    def cost(self, interval: TiledInterval, grid: Grid, backward: bool) -> Cost:
        tiles = self.sample_tiles(interval.begin, interval.end, grid)
        pass_cost = self.pass_cost(
            interval.begin, interval.end, interval.pieces, interval.no_background, grid, backward
        )
        return Cost(self.cost_model.peak(tiles, interval, backward), *pass_cost)

    @memoized
    def pass_cost(
        self, begin: int, end: int, pieces: int, no_background: bool, grid: Grid, backward: bool
    ) -> tuple[float, float]:  # fmt: skip
        """(seconds, operations) of a pass over an interval's tiles, without transfers."""
        distinct = self.distinct_share(TiledInterval(begin, end, no_background=no_background), grid)
        return self.cost_model.pass_cost(self.sample_tiles(begin, end, grid), backward, distinct, pieces)

    @memoized
    def distinct_share(self, interval: TiledInterval, grid: Grid) -> float:
        """The share of an interval's tiles that are computed; see [Note: shared work] in `analysis.background`."""
        if not self.shares_background(interval):
            return ALL
        return self.network.background.distinct(self.program_of(interval.begin, interval.end), grid)

    def shares_background(self, interval: TiledInterval) -> bool:
        """True if an interval is planned to share background."""
        return bool(self.network.background) and not interval.no_background

    @memoized
    def scans_of(self, begin: int, end: int, grid: Grid) -> Scans | None:
        """The scans of which one is this interval's; None if some operator reverses the order of rows."""
        program = self.program_of(begin, end)
        if (end, grid, program.reference) not in self._scans:
            self._scans[end, grid, program.reference] = Scans(program, grid)
        found = self._scans[end, grid, program.reference]
        try:
            found.parts(program)
        except PlanError:
            return None
        return found if can_scan_parts(program, grid) else None

    @memoized
    def scan_cost(self, interval: TiledInterval, grid: Grid, backward: bool) -> Cost | None:
        """Cost of a scan; None if the interval cannot be scanned."""
        scans = self.scans_of(interval.begin, interval.end, grid)
        program = self.program_of(interval.begin, interval.end)
        return None if scans is None else self.cost_model.scan(program, scans, interval, backward)

    @memoized
    def scan_bytes(self, interval: TiledInterval, grid: Grid, backward: bool) -> tuple[int, int] | None:
        """Bytes of a scan's largest tile and of all rows that its tiles hand on; None if it cannot be scanned."""
        scans = self.scans_of(interval.begin, interval.end, grid)
        program = self.program_of(interval.begin, interval.end)
        return None if scans is None else self.cost_model.scan_bytes(program, scans, interval, backward)

    @memoized
    def middle_bytes(self, interval: TiledInterval, grid: Grid, backward: bool) -> int:
        """Bytes of a tile in the middle: a quick lower bound of the largest tile's."""
        return self.cost_model.middle_peak(self.sample_tiles(interval.begin, interval.end, grid), interval, backward)

    @memoized
    def grids_by_seconds(
        self, begin: int, end: int, pieces: int, no_background: bool, backward: bool, least: int
    ) -> list[Grid]:
        """The grids of an interval, beginning with number ``least``, by their seconds without transfers."""
        grids = self.grids(begin, end, self.shares_background(TiledInterval(begin, end, no_background=no_background)))[
            least:
        ]
        return sorted(grids, key=lambda grid: self.pass_cost(begin, end, pieces, no_background, grid, backward)[0])

    @cached_property
    def least_seconds_until(self) -> list[tuple[float, float]]:
        """Least seconds of all operators before each place in the order: of forward, and of both passes."""
        each = self.cost_model.operators.least_seconds(self.network.trains)
        return list(zip(*(itertools.accumulate(seconds.tolist(), initial=0.0) for seconds in each), strict=True))

    def least_seconds(self, begin: int, end: int, no_background: bool) -> tuple[float, float]:
        """A lower bound of a tiled segment's seconds: of forward, and of both passes. For one that shares background it
        is 0."""
        if self.shares_background(TiledInterval(begin, end, no_background=no_background)):
            return 0.0, 0.0
        (forward, both), (forward_before, both_before) = self.least_seconds_until[end], self.least_seconds_until[begin]
        return forward - forward_before, both - both_before

    def fastest_grid(self, interval: TiledInterval, room: int, backward: bool) -> tuple[Grid, Cost] | None:
        """The fastest grid whose tiles fit into ``room``: rarely the coarsest, as small tiles stay in a cache."""
        interval = self.first_equal(interval)
        grids = self.grids(interval.begin, interval.end, self.shares_background(interval))
        # Finer tiles are smaller.
        least = bisect_left(grids, True, key=lambda grid: self.middle_bytes(interval, grid, backward) <= room)
        for grid in self.grids_by_seconds(
            interval.begin, interval.end, interval.pieces, interval.no_background, backward, least
        ):
            cost = self.cost(interval, grid, backward)
            if cost.bytes <= room:
                return grid, cost
        return None

    @memoized
    def scan_grids(self, begin: int, end: int) -> list[Grid]:
        reference = self.program_of(begin, end).reference
        return [row_grid(reference, count) for count in SCANS if count <= reference[0]]

    def coarsest_scan(self, interval: TiledInterval, room: int, trains: bool) -> tuple[Grid, Cost, Cost] | None:
        """The coarsest scan that fits, with its cost forward and backward."""
        here = self.first_equal(interval)

        def needs(grid: Grid, backward: bool) -> tuple[int, int] | None:
            found = self.scan_bytes(here, grid, backward)
            return None if found is None else (found[0], found[1] if trains else 0)

        def may_fit(grid: Grid) -> bool:
            found = needs(grid, trains)
            return found is not None and found[0] <= room

        grids = self.scan_grids(here.begin, here.end)
        for grid in grids[bisect_left(grids, True, key=may_fit) :]:
            both = [needs(grid, False), needs(grid, trains)]
            if any(found is None or found[1] > room for found in both):
                break  # finer ones hand more rows on
            if max(sum(found) for found in both if found is not None) <= room:
                forward, backward = self.scan_cost(here, grid, False), self.scan_cost(here, grid, True)
                assert forward is not None and backward is not None
                return grid, forward, backward
        return None

    # Kept intervals

    @memoized
    def kept_peak(self, begin: int, end: int) -> int:
        """The peak of a kept interval while it runs."""
        return self.cost_model.kept_peak(begin, end)

    @memoized
    def saved_bytes(self, begin: int, end: int) -> int:
        return self.network.saved_bytes(begin, end)

    @memoized
    def kept_seconds(self, begin: int, end: int) -> float:
        return self.cost_model.kept_seconds(self.network.order[begin:end])

    @memoized
    def image_bytes_read_first(self, begin: int, end: int) -> int:
        """Bytes of images that a kept segment is the first to read whole and that are not on the device yet."""
        network = self.network
        first = network.first_read
        seen = {v for n in network.order[begin:end] for v in n.maps if is_given(v) and first[v] >= begin}
        return sum(v.bytes for v in seen if reads_copy(v))

    @memoized
    def plain_work(self, begin: int, end: int) -> float:
        return float(sum(self.network.profiles[n.serial].work for n in self.network.order[begin:end]))

    @memoized
    def cotangent_bytes(self, cut: int, offloaded: frozenset[Value]) -> int:
        """Bytes on the device of the cotangents of the maps that are alive at a cut, without offloaded ones."""
        return sum(size for key, size in self.cotangent_sizes(cut).items() if key not in offloaded)

    @memoized
    def cotangent_sizes(self, cut: int) -> dict[Value, int]:
        """Bytes of the cotangent of each map that is alive at a cut."""
        return {v: cotangent_bytes([v]) for v in self.network.alive[cut] if not is_given(v)}

    @memoized
    def path(self, begin: int, end: int) -> str:
        """The modules of an interval, first to last."""
        paths = [n.path or n.name for n in self.network.order[begin:end]]
        return paths[0] if paths[0] == paths[-1] else f"{paths[0]} … {paths[-1]}"

    def one_tile(self, begin: int) -> Grid:
        return Grid((1,) * len(self.network.order[begin].maps[0].space.extent))
