"""The seconds that a plan takes as far as the cost model knows, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_plugin.dropped import Dropped, passed, still_needed
from lightning_plugin.graph import Value
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.cost import Coster
from lightning_plugin.planner.lower import Lower, one_way
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.rates import Rates
from lightning_plugin.planner.tiles import Diagonal
from lightning_plugin.planner.ways import pass_seconds, with_transfers
from lightning_plugin.program.program import Program, Target, resolve


def predict(plan: Plan, network: Network, rates: Rates) -> float:
    """Seconds of a step: a plan that a search has made says the same of itself."""
    coster = Coster(network, rates)
    made: dict[int, float] = {}
    dropped: list[Dropped] = []
    total = sum(chain.forecast.seconds for chain in plan.chains)
    for segment, targets in zip(plan.segments, resolve(plan, network.nodes), strict=True):
        total += seconds(coster, segment, targets, made, dropped)
        for v in (v for t in targets for v in t.node.outputs if v.is_map):
            made[id(v)] = 0.0 if segment.keep else to_tier(rates, segment, v)
    return total


def seconds(
    coster: Coster, segment: SegmentPlan, targets: list[Target], made: Mapping[int, float], dropped: list[Dropped]
) -> float:
    """One segment, after those that have made the maps it reads; ``made`` says how long each is on its way, and
    ``dropped``, to which the segment adds, what those before have dropped."""
    if segment.keep:
        read = {id(v) for t in targets for v in t.node.maps}
        ways_back = 4 if coster.network.trains else 1  # see `Search.kept`
        return coster.kept_seconds([t.node for t in targets]) + ways_back * sum(made.get(key, 0.0) for key in read)
    program = Program.build(targets, lambda v: id(v) in made)
    ways = (False, True) if any(t.requires_grad for t in program.targets) else (False,)
    if segment.halo == "share":
        passes = [coster.scan(program, segment.forward, backward) for backward in ways]
    else:
        passes = [coster.forward(Diagonal(program, segment.forward))]
        passes += [coster.backward(Diagonal(program, segment.backward)) for _ in ways[1:]]
    writes = sum(to_tier(coster.rates, segment, t.stored) for t in targets if t.stored is not None)
    reads = sum(made.get(id(v), 0.0) for v in program.reads)
    back = passes[1].seconds if len(passes) > 1 else None
    total = with_transfers(passes[0].seconds, back, writes, reads, segment.ahead)
    if segment.drop:
        maps = frozenset(id(t.stored) for t in targets if t.stored is not None)
        needs = frozenset(map(id, program.reads))
        mine = Dropped(maps, 0, 0, needs, segment.drop, seconds=pass_seconds(passes[0].seconds, reads, segment.ahead))
        total += sum(d.seconds for d in (mine, *passed(still_needed(dropped, needs), segment.drop)))
        dropped.append(mine)
    return total


def to_tier(rates: Rates, segment: SegmentPlan, v: Value) -> float:
    """Seconds that a map takes to where a segment stores it."""
    if segment.tier == "device":
        return 0.0
    return one_way(rates, segment.tier, Lower(half=segment.half).size([v]))
