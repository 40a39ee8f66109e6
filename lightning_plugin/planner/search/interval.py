"""What an interval of the order costs as one segment: on which grid it fits, tiled, scanned or kept."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from lightning_plugin.boxes import Grid, pieces_of
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.planner.analysis.glass import ALL
from lightning_plugin.planner.analysis.network import Network, cotangent_bytes, is_given
from lightning_plugin.planner.costs.cost import Cost, Coster
from lightning_plugin.planner.costs.grids import (
    COUNTS,
    SCANS,
    Choice,
    Floor,
    first_that,
    image_counts,
    nested,
    row_grid,
)
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans
from lightning_plugin.planner.costs.tiles import Diagonal
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.pieces import Strip, strips
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.scan import parts_in_order

#: What a search asks again and again.
MEMOIZED = (
    "program", "outline", "first", "costed", "stored_at", "diagonal", "middle", "grids", "choice", "cost", "scan_cost",
    "kept_peak", "plain_work", "distinct", "kept_seconds", "given_whole", "saved_bytes", "alive", "ends", "path",
    "strips", "scan_grids", "scan_least", "scans_of", "scan_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Where:
    """An interval ``[begin, end)`` in its surroundings: which of the maps it reads lie on a lower tier, whether what
    it stores goes there, and whether such tiles travel beside the work on others; in how many ``pieces`` they read
    keys. A ``blind`` one is planned as if no part of its maps were known to be constant."""

    begin: int
    end: int
    reads: frozenset[int] = frozenset()
    leaving: bool = False
    ahead: bool = False
    pieces: int = 1
    blind: bool = False


def how_of(way: str, where: Where) -> str:
    """The name under which lessons are kept."""
    pieces = f"{where.pieces} pieces " if where.pieces > 1 else ""
    pieces += "blind " if where.blind else ""
    return f"{pieces}ahead {way}" if where.ahead else pieces + way


class Intervals:
    """The intervals of one network, and what rehearsals have taught of them."""

    def __init__(self, network: Network, rates: Rates, policy: Policy) -> None:
        self.network = network
        self.rates = rates
        self.policy = policy
        self.coster = Coster(network, rates)
        self.space = network.axes_of_space
        #: The first interval of each look.
        self.looks: dict[Hashable, tuple[int, int]] = {}
        #: True bytes of an interval's tiles for each byte predicted, by (begin, end, how).
        self.lessons: dict[tuple[int, int, str], float] = {}
        #: With a uniform policy, how many tiles the longest axis of every segment has.
        self.only: int | None = None
        self._scans: dict[tuple[int, Grid, tuple[int, ...]], Scans] = {}
        for name in MEMOIZED:  # for this search alone, so that nothing outlives it
            setattr(self, name, cache(getattr(self, name)))

    def stored_at(self, begin: int, end: int) -> list[Value]:
        """What a tiled segment has to store: made in it, read after it or asked for."""
        network = self.network
        made = {id(v) for n in network.order[begin:end] for v in n.outputs if v.is_map}
        alive = {id(v): v for v in network.alive[end] if id(v) in made}
        for n in network.order[begin:end]:
            for v in n.outputs:
                if v.is_map and id(v) in network.gathered:
                    alive[id(v)] = v
        return list(alive.values())

    def alive(self, cut: int) -> frozenset[int]:
        """The maps that are alive at a cut, by identity."""
        return frozenset(map(id, self.network.alive[cut]))

    def program(self, begin: int, end: int) -> Program | None:
        network = self.network
        stored = {id(v) for v in self.stored_at(begin, end)}
        targets = []
        for n in network.order[begin:end]:
            if isinstance(n.op, ReduceOp):
                targets.append(Target(n))
            elif id(n.outputs[0]) in stored:
                targets.append(Target(n, n.outputs[0]))
        if not targets:
            return None
        made = network.made
        return Program.build(targets, lambda v: id(v) in made and made[id(v)] < begin)

    def outline(self, begin: int, end: int) -> tuple[frozenset[int], bool]:
        """The maps that an interval reads, by identity, and whether anything it makes requires grad."""
        program = self.work_of(begin, end)
        return frozenset(map(id, program.reads)), any(t.requires_grad for t in program.targets)

    def first(self, begin: int, end: int) -> tuple[int, int]:
        """The first interval that costs the same, whatever is glass; see [Note: repeats] in `analysis.repeats`."""
        return self.looks.setdefault(self.network.repeats.look(self.work_of(begin, end)), (begin, end))

    def costed(self, where: Where) -> Where:
        """Where an interval is costed: the first like it, in the same surroundings. What glass saves is its own."""
        if self.sees(where):
            return where
        begin, end = self.first(where.begin, where.end)
        if (begin, end) == (where.begin, where.end):
            return where
        pairs = zip(self.work_of(where.begin, where.end).reads, self.work_of(begin, end).reads, strict=True)
        reads = frozenset(id(there) for here, there in pairs if id(here) in where.reads)
        return replace(where, begin=begin, end=end, reads=reads)

    def work_of(self, begin: int, end: int) -> Program:
        program = self.program(begin, end)
        assert program is not None
        return program

    # Grids

    def grids(self, begin: int, end: int, sees: bool) -> list[Grid]:
        """Grids from coarse to fine: fewer images at a time, which costs no halo; then rows, or tiles about as high as
        they are wide; where glass is shared (``sees``), such that tiles of one segment lie alike in another's."""
        reference = self.work_of(begin, end).reference
        if self.policy.shape == "whole":
            return [Grid((1,) * len(reference))]
        if self.policy.shape == "rows":
            return [row_grid(reference, count) for count in COUNTS if count <= reference[0]]
        space = len(reference) if self.space is None else min(self.space, len(reference))
        inner, images = reference[:space], reference[space:]
        among = image_counts(images)
        if sees:
            return nested(inner, images, among)
        found = [Grid((*(1 for _ in inner), *counts)) for counts in among]
        longest = max(inner, default=1)
        for count in COUNTS:
            if count > longest:
                break
            side = longest / count
            counts = tuple(pieces_of(size, max(1, round(size / side))) for size in inner)
            rows = (counts[0], *(1 for _ in counts[1:])) if counts else ()
            for cut in (rows, counts) if count in (2, 3) else (counts,):
                grid = Grid((*cut, *among[-1]))
                if grid not in found:
                    found.append(grid)
        return found

    def allowed(self, begin: int, end: int, sees: bool) -> list[Grid]:
        """The grids of an interval, or the one that a uniform policy has."""
        grids = self.grids(begin, end, sees)
        if self.only is None:
            return grids
        most = max((max(g.counts) for g in grids if max(g.counts) <= self.only), default=0)
        return [g for g in grids if max(g.counts) == most] or grids[-1:]

    # Costs

    def diagonal(self, begin: int, end: int, grid: Grid) -> Diagonal:
        return Diagonal(self.work_of(begin, end), grid)

    def strips(self, begin: int, end: int) -> Mapping[int, Strip]:
        """The maps that an interval can read piece by piece, by identity."""
        return strips(self.work_of(begin, end))

    def surround(self, where: Where) -> None:
        coster = self.coster
        coster.spilled, coster.leaving, coster.ahead = where.reads, where.leaving, where.ahead
        coster.pieces, coster.strips = where.pieces, {}
        if where.pieces > 1:
            coster.strips = self.strips(where.begin, where.end)

    def cost(self, where: Where, grid: Grid, backward: bool) -> Cost:
        tiles = self.diagonal(where.begin, where.end, grid)
        self.surround(where)
        distinct = self.distinct(where, grid)
        return self.coster.backward(tiles, distinct) if backward else self.coster.forward(tiles, distinct)

    def distinct(self, where: Where, grid: Grid) -> float:
        """The share of an interval's tiles that are computed; see [Note: shared work] in `analysis.glass`."""
        if not self.sees(where):
            return ALL
        return self.network.glass.distinct(self.work_of(where.begin, where.end), grid)

    def sees(self, where: Where) -> bool:
        """Whether an interval is planned for what is glass."""
        return bool(self.network.glass) and not where.blind

    def scans_of(self, begin: int, end: int, grid: Grid) -> Scans | None:
        """The scans of which one is this interval's, or None where some operator turns an axis round."""
        program = self.work_of(begin, end)
        if (end, grid, program.reference) not in self._scans:
            self._scans[end, grid, program.reference] = Scans(program, grid)
        found = self._scans[end, grid, program.reference]
        try:
            found.parts(program)
        except PlanError:
            return None
        return found if parts_in_order(program, grid) else None

    def scan_cost(self, where: Where, grid: Grid, backward: bool) -> Cost | None:
        """What a scan costs, where it can be."""
        self.surround(where)
        scans = self.scans_of(where.begin, where.end, grid)
        return None if scans is None else self.coster.scan(self.work_of(where.begin, where.end), scans, backward)

    def scan_bytes(self, where: Where, grid: Grid, backward: bool) -> tuple[int, int] | None:
        """The bytes of a scan's tiles, and of all that they hand on, where it can be."""
        self.surround(where)
        scans = self.scans_of(where.begin, where.end, grid)
        return None if scans is None else self.coster.scan_bytes(self.work_of(where.begin, where.end), scans, backward)

    def middle(self, where: Where, grid: Grid, backward: bool) -> int:
        """The bytes of a tile in the middle: no more than `cost` says, and quickly known."""
        tiles = self.diagonal(where.begin, where.end, grid)
        self.surround(where)
        peak = self.coster.backward_peak if backward else self.coster.forward_peak
        return peak(tiles.program, tiles.middle)

    def choice(self, where: Where, backward: bool, only: int | None) -> Choice:
        """The grids of an interval, with what they take; ``only`` is what `allowed` depends on."""
        begin, end = where.begin, where.end
        sees, glass = self.sees(where), self.network.glass

        def seconds(grid: Grid) -> float:
            self.surround(where)
            return self.coster.passed(self.diagonal(begin, end, grid), backward, self.distinct(where, grid))[0]

        def least(grid: Grid) -> float:
            return self.coster.least(self.work_of(begin, end), grid, backward, glass.tissue) if sees else 0.0

        def floor(grid: Grid) -> Floor:
            return self.coster.floor(self.diagonal(begin, end, grid), backward)

        # A finer grid may compute less of what is glass.
        return Choice(self.allowed(begin, end, sees), seconds, least, None if sees else floor)

    def cheapest(self, where: Where, room: int, backward: bool) -> tuple[Grid, Cost] | None:
        """The cheapest grid whose tiles fit into ``room``: rarely the coarsest, as small tiles stay in a cache."""
        how = how_of("backward" if backward else "forward", where)
        lesson = self.lessons.get((where.begin, where.end, how), 1.0)
        here = self.costed(where)
        # Where maps lie changes no grid's tiles, and transfers are added later.
        choice = self.choice(Where(here.begin, here.end, pieces=here.pieces, blind=here.blind), backward, self.only)
        small = first_that(choice.grids, lambda g: lesson * self.middle(here, g, backward) <= room)
        for grid in choice.from_(small):
            cost = taught(self.cost(here, grid, backward), lesson)
            if cost.bytes <= room:
                return grid, cost
        return None

    def scan_grids(self, begin: int, end: int) -> list[Grid]:
        reference = self.work_of(begin, end).reference
        return [row_grid(reference, count) for count in SCANS if count <= reference[0]]

    def scan_least(self, begin: int, end: int, trains: bool) -> float:
        """Seconds below which no scan of an interval is."""
        grids = self.scan_grids(begin, end)
        return self.coster.scan_least(self.work_of(begin, end), grids, trains) if grids else math.inf

    def scans(self, where: Where, room: int, trains: bool) -> tuple[Grid, Cost, Cost] | None:
        """The coarsest scan that fits, forward and backward."""
        here = self.costed(where)
        grids = self.scan_grids(here.begin, here.end)
        forth, back = (
            self.lessons.get((where.begin, where.end, how), 1.0) for how in ("scan forward", "scan backward")
        )

        def needs(grid: Grid, backward: bool) -> tuple[int, int] | None:
            found = self.scan_bytes(here, grid, backward)
            if found is None:
                return None
            most, carried = found
            return int((back if backward else forth) * most), carried if trains else 0

        def may_fit(grid: Grid) -> bool:
            found = needs(grid, trains)
            return found is not None and found[0] <= room

        for grid in grids[first_that(grids, may_fit) :]:
            both = [needs(grid, False), needs(grid, trains)]
            if any(found is None or found[1] > room for found in both):
                return None  # finer ones hand more rows on
            if all(found is not None and sum(found) <= room for found in both):
                forward, backward = self.scan_cost(here, grid, False), self.scan_cost(here, grid, True)
                assert forward is not None and backward is not None
                return grid, taught(forward, forth), taught(backward, back)
        return None

    # Kept intervals

    def kept_peak(self, begin: int, end: int) -> int:
        first = self.looks.setdefault(self.network.kept_look(begin, end), (begin, end))
        if first != (begin, end):
            return self.kept_peak(*first)
        self.surround(Where(begin, end))
        return self.coster.kept_peak(begin, end)

    def saved_bytes(self, begin: int, end: int) -> int:
        return self.network.saved_bytes(begin, end)

    def kept_seconds(self, begin: int, end: int) -> float:
        return self.coster.kept_seconds(self.network.order[begin:end])

    def once(self, node: Node) -> float:
        """The seconds of a node's forward, run whole."""
        return self.coster.time(node, 1.0, 1)

    def given_whole(self, begin: int, end: int) -> int:
        """Images that a kept segment is the first to read whole and that are not on the device yet."""
        network = self.network
        first = network.first_read
        seen = {id(v): v for n in network.order[begin:end] for v in n.maps if is_given(v) and first[id(v)] >= begin}
        self.surround(Where(begin, end))
        return sum(self.coster.read_bytes(v, v.bytes) for v in seen.values())

    def plain_work(self, begin: int, end: int) -> float:
        return float(sum(self.network.profiles[n.serial].work for n in self.network.order[begin:end]))

    def ends(self, cut: int, spilled: frozenset[int]) -> int:
        """The cotangents, on the device, of what is alive at a cut."""
        return cotangent_bytes(v for v in self.network.alive[cut] if not is_given(v) and id(v) not in spilled)

    def path(self, begin: int, end: int) -> str:
        """The modules of an interval, first to last."""
        paths = [n.path or n.name for n in self.network.order[begin:end]]
        return paths[0] if paths[0] == paths[-1] else f"{paths[0]} … {paths[-1]}"

    def one_tile(self, begin: int) -> Grid:
        return Grid((1,) * len(self.network.order[begin].maps[0].space.extent))


def taught(cost: Cost, lesson: float) -> Cost:
    """A cost as rehearsals have corrected it."""
    if lesson == 1.0:
        return cost
    return replace(cost, bytes=int(cost.bytes * lesson), predicted=cost.bytes)
