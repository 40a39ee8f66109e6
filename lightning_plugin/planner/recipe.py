"""A plan for one size, made from a plan for another.

[Note: recipe] The decisions of a plan (cuts, kept segments, tiers, sides of tiles) do not depend on an image's exact
size. A *recipe* is a plan with the size it was made for: at another size its tiles have the sides they had, and there
are as many as it takes; offloaded maps go to the tiers that have room for them. A rehearsal finds the peak there. If it
is over the limit, the tiles of the segment at the peak are made smaller, a few times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_plugin.boxes import Grid, reference_of
from lightning_plugin.graph import Node
from lightning_plugin.ops import Source
from lightning_plugin.plan import Plan, SegmentForecast, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.lower import LowerTiers, beside_parameters, tier_of
from lightning_plugin.planner.rehearsal.rehearse import RehearsedMemory, rehearse
from lightning_plugin.program.program import targets_of

#: The largest ratio between the positions of an image and those that a recipe was made for: beyond, other decisions are
#: worth a search.
NEAR = 1.2
#: Rehearsals of a recipe at another size, before a plan is searched for.
ATTEMPTS = 4
#: Tiles are made smaller by this factor on their longest axis.
SMALLER = 0.75


@dataclass(eq=False)
class Recipe:
    """A plan, and the size it was made for.

    Attributes:
        image: The extents of the images.
        references: The extents of each segment's smallest map.
        positions: The positions of the images.
        too_large: The fewest positions of an image with which it did not keep the budget.
    """

    plan: Plan
    image: tuple[int, ...]
    references: tuple[tuple[int, ...], ...]
    positions: int
    too_large: float = math.inf

    @staticmethod
    def of(plan: Plan, network: Network) -> Recipe:
        """The recipe of a plan that was made for a network."""
        nodes = network.nodes
        return Recipe(plan, image_of(nodes), references(plan, nodes), positions(nodes))

    def distance(self, nodes: Sequence[Node]) -> float:
        """The ratio of an image's positions to the recipe's, or its inverse: 1 or more."""
        ratio = positions(nodes) / self.positions
        return max(ratio, 1 / ratio)

    def at(self, network: Network, lower: LowerTiers, room: float = math.inf) -> Plan | None:
        """The plan for a network of the same structure and another size; None if there is no room for it on the device,
        or for its maps below."""
        nodes = network.nodes
        if image_of(nodes) == self.image:
            return self.plan if self.plan.peak_bytes <= room else None
        plan: Plan | None = retiered(self.resized(nodes), network, lower)
        for _ in range(ATTEMPTS):
            if plan is None:
                return None
            found = rehearse(plan, network)
            if found.peak + plan.forecast.reserve_bytes <= room:
                return self.with_forecast(plan, found, nodes)
            plan = with_smaller_tiles(plan, found, nodes)
        return None

    def resized(self, nodes: Sequence[Node]) -> Plan:
        """The same decisions, with tiles of the same sides."""
        now = references(self.plan, nodes)
        segments = tuple(map(segment_at, self.plan.segments, self.references, now))
        return replace(self.plan, segments=segments)

    def with_forecast(self, plan: Plan, found: RehearsedMemory, nodes: Sequence[Node]) -> Plan:
        """A plan with the forecast of its rehearsal, and seconds in proportion to the image."""
        ratio = positions(nodes) / self.positions
        segments = tuple(
            replace(s, forecast=resized_forecast(with_rehearsed_bytes(s.forecast, i, found), ratio))
            for i, s in enumerate(plan.segments)
        )
        forecast = replace(
            plan.forecast,
            peak_bytes=found.peak + plan.forecast.reserve_bytes,
            held_bytes=found.held,
            plain_bytes=int(plan.plain_bytes * ratio),
            index_bytes=int(plan.forecast.index_bytes * ratio),
            made_bytes=int(plan.forecast.made_bytes * ratio),
            seconds=plan.seconds * ratio,
        )
        return replace(plan, segments=segments, forecast=forecast)


def resized_forecast(forecast: SegmentForecast, ratio: float) -> SegmentForecast:
    """A segment's figures that no rehearsal gives, in proportion to the image."""
    return replace(forecast, seconds=forecast.seconds * ratio, stored_bytes=int(forecast.stored_bytes * ratio))


def with_rehearsed_bytes(forecast: SegmentForecast, place: int, found: RehearsedMemory) -> SegmentForecast:
    """A segment's forecast with the figures of a rehearsal."""
    forward, backward = found.turn(place, "forward"), found.turn(place, "backward")
    return replace(
        forecast,
        forward_bytes=forward.peak,
        backward_bytes=backward.peak,
        backward_needs=backward.needs,
        retained_needs=backward.retained,
    )


def with_smaller_tiles(plan: Plan, found: RehearsedMemory, nodes: Sequence[Node]) -> Plan | None:
    """The plan with smaller tiles in the segment at the peak; None if that segment has no tiles."""
    worst, direction = max(found.turns, key=lambda who: found.turns[who].peak)
    if not 0 <= worst < len(plan.segments) or direction == "recompute":
        return None  # it holds most in a link of a chain, or where a map is made again
    segment = plan.segments[worst]
    extent = references(plan, nodes)[worst]
    if segment.keep:
        return None
    shares = segment.halo == "share"  # rows are handed on along the one axis that is cut, alike in both directions
    grid = segment.forward if direction == "forward" or shares else segment.backward
    sides = list(sides_of(grid, extent))
    axes = [i for i, count in enumerate(grid.counts) if count > 1 or not shares]
    axis = max(axes, key=sides.__getitem__, default=0)
    if sides[axis] == 1:
        return None
    sides[axis] = int(SMALLER * sides[axis]) or 1
    finer = grid_of(sides, extent)
    changed = replace(
        segment,
        forward=finer if direction == "forward" or shares else segment.forward,
        backward=finer if direction == "backward" or shares else segment.backward,
    )
    return replace(plan, segments=(*plan.segments[:worst], changed, *plan.segments[worst + 1 :]))


def sides_of(grid: Grid, extent: Sequence[int]) -> tuple[int, ...]:
    """The sides of a grid's tiles on a map."""
    return grid.sides or tuple(-(-size // count) for size, count in zip(extent, grid.counts, strict=False))


def grid_of(sides: Sequence[int], extent: Sequence[int]) -> Grid:
    """The grid of tiles with these sides on a map."""
    return Grid(tuple(-(-size // side) for size, side in zip(extent, sides, strict=False)), tuple(sides))


def segment_at(segment: SegmentPlan, was: Sequence[int], now: Sequence[int]) -> SegmentPlan:
    """A segment with tiles of the sides they had where its map had other extents."""
    if segment.keep:
        return segment
    forward, backward = (grid_at(segment, grid, was, now) for grid in (segment.forward, segment.backward))
    return replace(segment, forward=forward, backward=backward)


def grid_at(segment: SegmentPlan, grid: Grid, was: Sequence[int], now: Sequence[int]) -> Grid:
    """A grid of tiles with the sides they had on a map of other extents. A segment that shares halos stays cut along
    one axis: on others its tiles are as long as the map."""
    sides = sides_of(grid, was)
    if segment.halo == "share":
        cut = zip(sides, grid.counts, now, strict=False)
        sides = tuple(side if count > 1 else size for side, count, size in cut)
    return grid_of(sides, now)


def image_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The extents of the images."""
    return tuple(e for n in nodes if isinstance(n.op, Source) for e in n.outputs[0].space.extent)


def positions(nodes: Sequence[Node]) -> int:
    """The positions of the images, along all of their axes: a bag has more of them the more patches it has."""
    return max(1, sum(math.prod(n.outputs[0].space.extent) for n in nodes if isinstance(n.op, Source)))


def references(plan: Plan, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """The extents of each segment's smallest map, whose cuts its others follow."""
    return tuple(reference_of([t.map.space.extent for t in targets]) for targets in targets_of(plan, nodes))


def retiered(plan: Plan, network: Network, lower: LowerTiers) -> Plan | None:
    """A plan for another size, with offloaded maps on the tiers that have room for them; None if there is none."""
    if lower.host is None:
        return plan
    at = {n.serial: i for i, n in enumerate(network.order)}
    before, segments, begin = beside_parameters(network, plan.on_host), list(plan.segments), 0
    for i, (segment, targets) in enumerate(zip(plan.segments, targets_of(plan, network.nodes), strict=True)):
        end = 1 + max(at[t.node.serial] for t in targets)
        maps = [t.stored for t in targets if t.stored is not None]
        if segment.tier != "device":
            names, size = frozenset(maps), lower.size(maps)
            tier = tier_of(lower, before, names, size, network, begin, end)
            if tier is None:
                return None
            before = before.with_maps(tier, names, size)
            segments[i] = replace(segment, tier=tier)
        before, begin = before.at(frozenset(network.alive[end])), end
    return replace(plan, segments=tuple(segments))
