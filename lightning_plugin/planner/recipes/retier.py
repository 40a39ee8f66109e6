"""Where the maps of a plan go at another size: what fitted the host may not fit it there, or more may."""

from __future__ import annotations

from dataclasses import replace

from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.lower import Lower
from lightning_plugin.planner.costs.lower_maps import beside_parameters, tier_of
from lightning_plugin.program.program import resolve


def retiered(plan: Plan, network: Network, lower: Lower) -> Plan | None:
    """A plan that was made for another size, with the maps that leave the device where there is room for them; None
    where there is none."""
    if lower.host is None:
        return plan
    at = {n.serial: i for i, n in enumerate(network.order)}
    before, segments, begin = beside_parameters(network, plan.on_host), list(plan.segments), 0
    for i, (segment, targets) in enumerate(zip(plan.segments, resolve(plan, network.nodes), strict=True)):
        end = 1 + max(at[t.node.serial] for t in targets)
        maps = [t.stored for t in targets if t.stored is not None]
        if segment.tier != "device":
            names, size = frozenset(maps), lower.size(maps)
            tier = tier_of(lower, before, names, size, network, begin, end)
            if tier is None:
                return None
            before = before.more(tier, names, size)
            segments[i] = replace(segment, tier=tier)
        before, begin = before.at(frozenset(network.alive[end])), end
    return replace(plan, segments=tuple(segments))
