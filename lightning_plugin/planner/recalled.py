"""Whether a segment's backward is to read back what the segment stores; see [Note: recall] in `program.recall`."""

from __future__ import annotations

from dataclasses import replace

from lightning_plugin.planner.interval import Intervals
from lightning_plugin.planner.lower import Lower
from lightning_plugin.planner.lower_maps import LowerMaps, way_back
from lightning_plugin.planner.site import Site


def recalled(intervals: Intervals, lower: Lower, before: LowerMaps, site: Site) -> Site | None:
    """A tiled segment's surroundings where its backward reads back what it stores; None where there is nothing to read
    back, where making it again takes less, and where there is no room for it. Identical tiles are rather computed once
    for all."""
    where, placement, coster = site.where, site.placement, intervals.coster
    if not site.trains or not placement.stored or intervals.network.glass or lower.half:
        return None
    maps = coster.in_backward(intervals.work_of(where.begin, where.end)).maps.values()
    there = before.more(placement.tier, placement.maps, placement.below)
    seconds = way_back(intervals.rates, there, lower.sizes(maps)) if where.leaving else 0.0
    ends = site.room.ends + (0 if where.leaving else sum(v.bytes for v in maps))
    again = sum(intervals.once(v.node) for v in maps if v.node is not None)
    if seconds >= again or ends + site.again > site.room.free:
        return None
    return replace(site, where=replace(where, recall=True), room=replace(site.room, ends=ends), recalled=seconds)
