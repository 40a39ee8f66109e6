"""Partial plans, up to a cut, with the maps that they drop; and the fronts of those that no other beats.

Of dropped maps, this is [Note: dropped] in `execute.function` as far as plans, predictions and pictures need it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from lightning_plugin.graph import Value
from lightning_plugin.plan import DEEPEST, SegmentForecast, SegmentPlan
from lightning_plugin.planner.costs.lower import NO_MAPS, LowerMaps

#: Partial plans that are carried on from a cut,
MOST_PARTIAL = 24
#: and besides those with dropped maps, whose memory they will be rid of, if maps are dropped to depth 1,
MOST_OPEN = 6
#: and if they are dropped deeper.
MOST_OPEN_DEEP = 24


@dataclass(frozen=True)
class Dropped:
    """The stored maps that one segment drops.

    Attributes:
        maps: The maps.
        size: Their bytes.
        tiles: Bytes of the tiles that recompute them.
        reads: The maps that are read to recompute them.
        depth: The depth to which they are dropped.
        work: Operations of recomputing them once.
        seconds: Seconds of recomputing them once.
    """

    maps: frozenset[Value]
    size: int
    tiles: int
    reads: frozenset[Value]
    depth: int = 1
    work: float = 0.0
    seconds: float = 0.0


def still_needed(dropped: Sequence[Dropped], maps: Collection[Value]) -> tuple[Dropped, ...]:
    """The segments that dropped maps, in their order, whose maps are among ``maps`` or are read to recompute
    such."""
    found: list[Dropped] = []
    for d in reversed(dropped):
        if not d.maps.isdisjoint(maps) or any(not f.reads.isdisjoint(d.maps) for f in found):
            found.append(d)
    return tuple(reversed(found))


def remaining(dropped: Sequence[Dropped], maps: Collection[Value] = ()) -> tuple[Dropped, ...]:
    """The segments that dropped maps, in their order, whose maps are there once ``maps`` are recomputed:
    these, and each that no shallower drop follows."""
    found: list[Dropped] = []
    least = DEEPEST
    for d in reversed(dropped):
        if d.depth <= least or not d.maps.isdisjoint(maps):
            found.append(d)
        least = min(least, d.depth)
    return tuple(reversed(found))


def recomputed_in_passing(dropped: Sequence[Dropped], depth: int) -> tuple[Dropped, ...]:
    """The segments that dropped maps, in their order, whose maps are recomputed one more time if the next
    segment drops its maps to ``depth``: they are freed on the way there, and recomputed when backward comes to them."""
    found: list[Dropped] = []
    for d in reversed(dropped):
        if d.depth <= depth:
            break
        found.append(d)
    return tuple(reversed(found))


def recompute_peak(dropped: Sequence[Dropped], maps: Collection[Value]) -> int:
    """Peak bytes of recomputing all dropped maps in order, beyond those that stay."""
    there = most = 0
    stay = remaining(dropped, maps)
    for d in dropped:
        read = sum(f.size for f in dropped if f not in stay and not f.maps.isdisjoint(d.reads))
        most = max(most, there + read + d.size + d.tiles)
        there += d.size if d in stay else 0
    return max(0, most - there)


@dataclass(eq=False)
class Partial:
    """A plan up to a cut.

    Its bytes are those that are live when backward has come back to the cut. After a kept segment a plan ignores
    background, since the constant parts of kept maps are not looked at.

    Attributes:
        keeps: Bytes that stay from forward on.
        seconds: Its time.
        peak: Its peak until now.
        offloaded: Maps on lower tiers.
        lower: Bytes on lower tiers.
        extra: Operations beyond the plain pass.
        piece: Makes its last segment, once the plan is taken.
        before: The plan without its last segment.
        dropped: Segments whose dropped maps are still needed.
        back: Bytes of dropped maps that have been recomputed and stay.
        keep: The last segment is kept.
        no_background: It goes on as if no part of a map were known to be constant.
    """

    keeps: int
    seconds: float
    peak: int
    offloaded: frozenset[Value] = frozenset()
    lower: LowerMaps = NO_MAPS
    extra: float = 0.0
    piece: Callable[[], SegmentPlan] | None = None
    before: Partial | None = None
    dropped: tuple[Dropped, ...] = ()
    back: int = 0
    keep: bool = False
    no_background: bool = False

    @property
    def held(self) -> int:
        return self.keeps + self.back

    def variants(self, background: bool) -> tuple[Partial, ...]:
        """This plan and, if some background is known, a variant that ignores it from here on: tiles of any grid, and
        scans, may win more than sharing."""
        return (self, replace(self, no_background=True)) if background and not self.no_background else (self,)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes by depth: if no dropped map came back to stay, if only those dropped to depth 1 did, and so on."""
        deepest = max((d.depth for d in self.dropped), default=0)
        return tuple(self.keeps + sum(d.size for d in self.dropped if d.depth <= k) for k in range(deepest + 1))

    def at(self, alive: frozenset[Value]) -> Partial:
        """The same plan at a cut with these maps alive: dropped and offloaded maps that nothing reads again are left
        out."""
        offloaded, lower = self.offloaded & alive, self.lower.at(alive)
        if not self.dropped:
            if not self.back and offloaded == self.offloaded:
                return self
            return replace(self, back=0, offloaded=offloaded, lower=lower)
        dropped = still_needed(self.dropped, alive)
        back = sum(d.size for d in remaining(dropped, alive))
        return replace(self, dropped=dropped, back=back, offloaded=offloaded, lower=lower)

    def segments(self) -> list[SegmentPlan]:
        """The segments of the plan, in order."""
        found: list[SegmentPlan] = []
        step: Partial | None = self
        while step is not None:
            if step.piece is not None:
                found.append(step.piece())
            step = step.before
        return found[::-1]


class Front:
    """Partial plans that end at one cut, without those that were beaten when they came."""

    def __init__(self) -> None:
        self.plans: list[Partial] = []
        self.changed = False
        #: Of plans without dropped maps the bytes held, ascending, and the seconds, descending; by
        #: `Partial.no_background`, since later segments cost them differently.
        self.closed: dict[bool, tuple[list[int], list[float]]] = {}
        #: The plans with dropped maps, likewise.
        self.opened: dict[bool, list[Partial]] = {False: [], True: []}

    def dominates(self, held: int, seconds: float, no_background: bool, levels: Sequence[int] = ()) -> bool:
        """True if some plan here is no worse than one with at least these bytes and seconds: one without dropped maps
        or, if the other has ``levels``, one with dropped maps, too."""
        helds, times = self.closed.setdefault(no_background, ([], []))
        place = bisect_right(helds, levels[0] if levels else held)
        if place > 0 and times[place - 1] <= seconds:
            return True
        rivals = self.opened[no_background] if levels else ()
        return any(r.seconds <= seconds and r.held <= held and is_nowhere_larger(r.levels, levels) for r in rivals)

    def add(self, plan: Partial) -> None:
        """Take in a plan, unless it is beaten."""
        if self.dominates(plan.held, plan.seconds, plan.no_background, plan.levels if plan.dropped else ()):
            return
        self.plans.append(plan)
        self.changed = True
        if plan.dropped:
            self.opened[plan.no_background].append(plan)
            return
        helds, times = self.closed[plan.no_background]
        place = end = bisect_left(helds, plan.held)
        while end < len(helds) and times[end] >= plan.seconds:
            end += 1
        helds[place:end], times[place:end] = [plan.held], [plan.seconds]

    def prune(self) -> None:
        """Keep the plans that no other beats, and of many a few."""
        if self.changed:
            kept = pareto_front(self.plans)
            self.plans, self.closed, self.opened = [], {}, {False: [], True: []}
            for plan in kept:
                self.add(plan)
            self.changed = False


def pareto_front(plans: Sequence[Partial]) -> list[Partial]:
    """The plans that no other beats in bytes, now and later, and in seconds, thinned evenly if they are many."""
    if len({plan.no_background for plan in plans}) > 1:  # later segments cost them differently
        return [
            p
            for no_background in (False, True)
            for p in pareto_front([p for p in plans if p.no_background == no_background])
        ]
    closed: list[Partial] = []
    for plan in sorted((p for p in plans if not p.dropped), key=lambda p: (p.held, p.seconds)):
        if not closed or plan.seconds < closed[-1].seconds:
            closed.append(plan)
    opened: list[Partial] = []
    for plan in sorted((p for p in plans if p.dropped), key=lambda p: (p.seconds, p.held, p.keeps)):
        rivals = (r for r in (*opened, *closed) if r.seconds <= plan.seconds)
        if not any(r.held <= plan.held and is_nowhere_larger(r.levels, plan.levels) for r in rivals):
            opened.append(plan)
    deep = any(d.depth > 1 for p in opened for d in p.dropped)
    return [*evenly_thinned(closed, MOST_PARTIAL), *evenly_thinned(opened, MOST_OPEN_DEEP if deep else MOST_OPEN)]


def levels(keeps: int, dropped: int, depth: int) -> tuple[int, ...]:
    """The levels of a plan that holds ``keeps`` bytes, and ``dropped`` bytes with the maps that it drops to a depth."""
    return (*(keeps for _ in range(depth)), dropped)


def is_nowhere_larger(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if no level of a plan is larger than another's; beyond its deepest, a plan's levels stay the same."""
    longest = max(len(one), len(other))
    return all(one[min(k, len(one) - 1)] <= other[min(k, len(other) - 1)] for k in range(longest))


def evenly_thinned(plans: list[Partial], most: int) -> list[Partial]:
    """At most ``most`` plans, evenly spaced."""
    if len(plans) <= most:
        return plans
    step = (len(plans) - 1) / (most - 1)
    return [plans[round(i * step)] for i in range(most)]


def merge_kept(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
    """Segments, with neighbours that are kept joined into one."""
    runs: list[list[SegmentPlan]] = []
    for s in segments:
        if runs and s.keep and runs[-1][-1].keep:
            runs[-1].append(s)
        else:
            runs.append([s])
    return [merged(run) for run in runs]


def merged(segments: Sequence[SegmentPlan]) -> SegmentPlan:
    first, last = segments[0], segments[-1]
    if first is last:
        return first
    return replace(
        first,
        targets=tuple(t for s in segments for t in s.targets),
        path=f"{first.path.split(' … ')[0]} … {last.path.split(' … ')[-1]}",
        forecast=reduce(merged_forecast, (s.forecast for s in segments)),
    )


def merged_forecast(one: SegmentForecast, other: SegmentForecast) -> SegmentForecast:
    """The forecast of two segments that run whole, one after the other."""
    return replace(
        one,
        stored_bytes=one.stored_bytes + other.stored_bytes,
        forward_bytes=max(one.forward_bytes, other.forward_bytes),
        backward_bytes=max(one.backward_bytes, other.backward_bytes),
        seconds=one.seconds + other.seconds,
        copied_bytes=one.copied_bytes + other.copied_bytes,
    )
