"""The predicted seconds of a plan, whoever made it; and plans that read stored maps back where that is faster.

Reading back ([Note: recall] in `program.program`) changes no cut, no grid and no tier. So it is decided last, for a
plan that the search has found: wherever reading takes less time than recomputing. A map on the device is read back into
more memory while its segment is pulled back; if there is no room for that, only maps on lower tiers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_plugin.graph import Value
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.background import ALL
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.cost import CostModel
from lightning_plugin.planner.costs.grids import SampleTiles
from lightning_plugin.planner.costs.lower import (
    NO_MAPS,
    NONE,
    LowerMaps,
    LowerTiers,
    TransferTime,
    fetch_time,
    offload_time,
)
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans
from lightning_plugin.planner.search.partial import Dropped, recomputed_in_passing, still_needed
from lightning_plugin.planner.search.ways import with_transfers
from lightning_plugin.program.program import BackwardProgram, Program, Target, programs


def predict(plan: Plan, network: Network, rates: Rates) -> float:
    """Seconds of a step by the cost model: those that a plan of the search has as its forecast."""
    return sum(chain.forecast.seconds for chain in plan.chains) + sum(segment_seconds(plan, network, rates))


def segment_seconds(plan: Plan, network: Network, rates: Rates) -> list[float]:
    """Seconds of each segment of a step."""
    return with_tiers(plan, network, rates, works(plan, network, rates))


class Work(NamedTuple):
    """Seconds of a segment's passes without transfers.

    Attributes:
        forward: Seconds of forward; of a kept segment, of both passes.
        backward: Seconds of backward; None for a kept segment, and without grad.
    """

    forward: float
    backward: float | None = None

    def times(self, factor: float) -> Work:
        """The work on an image of ``factor`` times the positions."""
        return Work(self.forward * factor, None if self.backward is None else self.backward * factor)


def works(plan: Plan, network: Network, rates: Rates) -> list[Work]:
    """The work of each segment, without transfers."""
    cost_model = CostModel(network, rates)
    return [work_of(cost_model, *segment) for segment in programs(plan, network.nodes)]


def work_of(cost_model: CostModel, segment: SegmentPlan, targets: Sequence[Target], program: Program | None) -> Work:
    """The work of one segment."""
    if program is None:
        return Work(cost_model.kept_seconds([t.node for t in targets]))
    trains = any(t.requires_grad for t in program.targets)
    grids, background = (segment.forward, segment.backward), cost_model.network.background
    if segment.halo == "share":
        scans = Scans(program, segment.forward)
        shares = scans.shares(program)
        forward = cost_model.pass_seconds(program, shares, scans.tiles, False)[0]
        backward = cost_model.pass_seconds(program, shares, scans.tiles, True)[0] if trains else None
    else:
        forth, back = (background.distinct(program, g) if segment.alike else ALL for g in grids)
        forward = cost_model.pass_cost(SampleTiles(program, segment.forward), False, forth)[0]
        tiles, backward = SampleTiles(program, segment.backward), None
        if trains:
            recalled, recomputed = cost_model.recall_cost, cost_model.pass_cost
            backward = (recalled(tiles, back) if segment.recall else recomputed(tiles, True, back))[0]
    return Work(forward, backward)


def with_tiers(plan: Plan, network: Network, rates: Rates, works: Sequence[Work]) -> list[float]:
    """Seconds of each segment, given its work, with its transfers."""
    lower = OffloadedMaps()
    dropped: list[Dropped] = []
    found = []
    for mine, (segment, targets, program) in zip(works, programs(plan, network.nodes), strict=True):
        if program is None:
            read = {v for t in targets for v in t.node.maps}
            brings = lower.read_time(rates, read).times(4 if network.trains else 1)  # see `Search.with_kept`
            found.append(brings.with_work(mine.forward, ahead=False))
        else:
            found.append(tiled(rates, segment, targets, program, mine, lower, dropped))
        lower = lower.with_segment(segment, targets)
    return found


@dataclass(frozen=True)
class OffloadedMaps:
    """Maps on lower tiers, and the bytes of each there."""

    there: LowerMaps = NO_MAPS
    sizes: Mapping[Value, int] = field(default_factory=dict)

    def with_segment(self, segment: SegmentPlan, targets: Sequence[Target]) -> OffloadedMaps:
        """With the maps that a segment offloads."""
        mine = stored_below(segment, targets)
        return OffloadedMaps(
            self.there.with_maps(segment.tier, frozenset(mine), sum(mine.values())), {**self.sizes, **mine}
        )

    def write_time(self, rates: Rates, segment: SegmentPlan, targets: Sequence[Target]) -> TransferTime:
        """Transfer time of a segment's outputs to their tier."""
        mine = stored_below(segment, targets)
        return offload_time(rates, self.there, segment.tier, sum(mine.values())) if mine else NONE

    def read_time(self, rates: Rates, maps: Iterable[Value]) -> TransferTime:
        """Transfer time of those of some maps that were offloaded."""
        return fetch_time(rates, self.there, {key: self.sizes[key] for key in maps if key in self.sizes})


def stored_below(segment: SegmentPlan, targets: Sequence[Target]) -> dict[Value, int]:
    """Bytes of each map that a segment stores below the device."""
    if segment.keep or segment.tier == "device":
        return {}
    return LowerTiers(half=segment.half).sizes([t.stored for t in targets if t.stored is not None])


def tiled(
    rates: Rates,
    segment: SegmentPlan,
    targets: Sequence[Target],
    program: Program,
    work: Work,
    lower: OffloadedMaps,
    dropped: list[Dropped],
) -> float:
    """Seconds of a tiled segment, after those that have put maps on ``lower`` tiers and ``dropped`` others, to which it
    adds."""
    writes = lower.write_time(rates, segment, targets)
    reads = lower.read_time(rates, program.reads)
    again = BackwardProgram.of(program).maps if segment.recall else ()
    recalled = lower.with_segment(segment, targets).read_time(rates, again)
    total = with_transfers(work.forward, work.backward, writes, reads, segment.ahead, recalled)
    if segment.drop:
        maps = frozenset(t.stored for t in targets if t.stored is not None)
        needs = frozenset(program.reads)
        mine = Dropped(maps, 0, 0, needs, segment.drop, seconds=reads.with_work(work.forward, segment.ahead))
        total += sum(d.seconds for d in (mine, *recomputed_in_passing(still_needed(dropped, needs), segment.drop)))
        dropped.append(mine)
    return total


# Reading back -----------------------------------------------------------------------------------------------


def recalls(plan: Plan, network: Network, rates: Rates) -> Iterator[Plan]:
    """A plan that reads back wherever it saves time, and one that does so on lower tiers only; none if it never
    does."""
    if not network.trains:
        return
    now = segment_seconds(plan, network, rates)
    then = segment_seconds(replace(plan, segments=tuple(map(recalling, plan.segments))), network, rates)
    faster = {i for i, (a, b) in enumerate(zip(now, then, strict=True)) if b < a}
    below = {i for i in faster if plan.segments[i].tier != "device"}
    for chosen in (faster, below) if below != faster else (faster,):
        if chosen:
            yield with_recall(plan, network, {i: then[i] - now[i] for i in chosen})


def recalling(segment: SegmentPlan) -> SegmentPlan:
    """A segment that reads back, if it may."""
    return replace(segment, recall=True) if segment.can_recall else segment


def with_recall(plan: Plan, network: Network, seconds: dict[int, float]) -> Plan:
    """A plan whose segments at the places in ``seconds`` read back, and take these seconds more."""
    segments, saved = list(plan.segments), work_saved(plan, network)
    for i, more in seconds.items():
        s = segments[i]
        recompute = max(0.0, s.forecast.recompute - saved[i][0])
        figures = replace(s.forecast, seconds=s.forecast.seconds + more, recompute=recompute)
        segments[i] = replace(s, recall=True, forecast=figures)
    forecast = replace(
        plan.forecast,
        seconds=plan.forecast.seconds + sum(seconds.values()),
        recompute=max(0.0, plan.forecast.recompute - sum(saved[i][1] for i in seconds)),
    )
    return replace(plan, segments=tuple(segments), forecast=forecast)


def work_saved(plan: Plan, network: Network) -> list[tuple[float, float]]:
    """Work that each segment's backward does not recompute if it reads back: as a share of its work and of all work."""
    found = []
    work = {n.serial: network.profiles[n.serial].work for n in network.order}
    for _, _, program in programs(plan, network.nodes):
        saved = plain = 0
        if program is not None:
            saved = sum(work[v.node.serial] for v in BackwardProgram.of(program).maps if v.node is not None)
            plain = sum(work[n.serial] for n in program.nodes)
        found.append((saved / max(1, plain), saved / max(1, sum(work.values()))))
    return found
