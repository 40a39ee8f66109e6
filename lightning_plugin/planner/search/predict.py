"""The seconds that a plan takes as far as the cost model knows, whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from lightning_plugin.dropped import Dropped, passed, still_needed
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.cost import Coster
from lightning_plugin.planner.costs.lower import Lower
from lightning_plugin.planner.costs.lower_maps import NONE, NOTHING, LowerMaps, Transit, way_back, way_down
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.costs.scans import Scans
from lightning_plugin.planner.costs.tiles import Diagonal
from lightning_plugin.planner.search.ways import with_transfers
from lightning_plugin.program.program import Program, Target, resolve
from lightning_plugin.program.recall import InBackward


def predict(plan: Plan, network: Network, rates: Rates) -> float:
    """Seconds of a step: a plan that a search has made says the same of itself."""
    return sum(chain.forecast.seconds for chain in plan.chains) + sum(each(plan, network, rates))


def each(plan: Plan, network: Network, rates: Rates) -> list[float]:
    """The seconds of each segment of a step."""
    coster = Coster(network, rates)
    made: set[int] = set()
    lower = Gone()
    dropped: list[Dropped] = []
    found = []
    for segment, targets in zip(plan.segments, resolve(plan, network.nodes), strict=True):
        found.append(seconds(coster, segment, targets, made, lower, dropped))
        lower = lower.more(segment, targets)
        made.update(id(v) for t in targets for v in t.node.outputs if v.is_map)
    return found


@dataclass(frozen=True)
class Gone:
    """What has gone to lower tiers, and the bytes of each map there, by identity."""

    there: LowerMaps = NOTHING
    sizes: Mapping[int, int] = field(default_factory=dict)

    def more(self, segment: SegmentPlan, targets: Sequence[Target]) -> Gone:
        """With what a segment stores."""
        mine = stored_below(segment, targets)
        return Gone(self.there.more(segment.tier, frozenset(mine), sum(mine.values())), {**self.sizes, **mine})

    def down(self, rates: Rates, segment: SegmentPlan, targets: Sequence[Target]) -> Transit:
        """What it takes for what a segment stores to get to its tier."""
        mine = stored_below(segment, targets)
        return way_down(rates, self.there, segment.tier, sum(mine.values())) if mine else NONE

    def back(self, rates: Rates, maps: Iterable[int]) -> Transit:
        """What those of some maps take that have gone."""
        return way_back(rates, self.there, {key: self.sizes[key] for key in maps if key in self.sizes})


def stored_below(segment: SegmentPlan, targets: Sequence[Target]) -> dict[int, int]:
    """The bytes of each map that a segment stores below the device."""
    if segment.keep or segment.tier == "device":
        return {}
    return Lower(half=segment.half).sizes([t.stored for t in targets if t.stored is not None])


def seconds(
    coster: Coster,
    segment: SegmentPlan,
    targets: list[Target],
    made: Set[int],
    lower: Gone,
    dropped: list[Dropped],
) -> float:
    """One segment, after those that have ``made`` the maps it reads, of which some are on ``lower`` tiers, and
    ``dropped`` others, to which the segment adds."""
    if segment.keep:
        read = {id(v) for t in targets for v in t.node.maps}
        brings = lower.back(coster.rates, read).times(4 if coster.network.trains else 1)  # see `Search.kept`
        return brings.with_work(coster.kept_seconds([t.node for t in targets]), ahead=False)
    program = Program.build(targets, lambda v: id(v) in made)
    ways = (False, True) if any(t.requires_grad for t in program.targets) else (False,)
    if segment.halo == "share":
        passes = [coster.scan(program, Scans(program, segment.forward), backward) for backward in ways]
    else:
        passes = [coster.forward(Diagonal(program, segment.forward))]
        passes += [coster.backward(Diagonal(program, segment.backward)) for _ in ways[1:]]
    writes = lower.down(coster.rates, segment, targets)
    reads = lower.back(coster.rates, map(id, program.reads))
    back = passes[1].seconds if len(passes) > 1 else None
    if segment.recall and back is not None:
        back = coster.recalled(Diagonal(program, segment.backward))[0]
    again = InBackward.of(program).maps if segment.recall else ()
    recalled = lower.more(segment, targets).back(coster.rates, again)
    total = with_transfers(passes[0].seconds, back, writes, reads, segment.ahead, recalled)
    if segment.drop:
        maps = frozenset(id(t.stored) for t in targets if t.stored is not None)
        needs = frozenset(map(id, program.reads))
        mine = Dropped(maps, 0, 0, needs, segment.drop, seconds=reads.with_work(passes[0].seconds, segment.ahead))
        total += sum(d.seconds for d in (mine, *passed(still_needed(dropped, needs), segment.drop)))
        dropped.append(mine)
    return total
