"""The fastest plan that keeps a budget: dynamic programming over cuts.

The network is cut into intervals of its order (`network`). Each is run tiled, and the maps that are alive at its end
are stored, or *kept*: run whole, as plain PyTorch does, with the memory that its operators save. From the image on, a
partial plan is a pair (bytes held so far, seconds so far), and only those are carried on that no other beats in both.
Bytes held only grow towards the loss, and backward frees them in reverse, so a segment's tiles have to fit beside the
bytes held up to it, and beside the cotangents of its ends; that is checked when it is added, with the cheapest grid
that fits. Dropped maps (see [Note: dropped] in `execute.function`) are an exception: they are held from where they are
recomputed to where the last segment begins that has them recomputed, and not beyond; and maps that are dropped deeper
than later ones are recomputed in passing, and cost their forward once more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

from lightning_plugin.graph import Value
from lightning_plugin.plan import Forecast, Plan, SegmentForecast, SegmentPlan
from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.planner.costs.lower import NONE, LowerTiers, fetch_time, offload_time, tier_of
from lightning_plugin.planner.costs.parameters import Copies, Streamed
from lightning_plugin.planner.costs.peak import TiledInterval
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.partial import (
    Dropped,
    Front,
    Partial,
    levels,
    merge_kept,
    recompute_peak,
    recomputed_in_passing,
    still_needed,
)
from lightning_plugin.planner.search.policies import AUTO, Policy, forced_cuts, low_memory_cuts, with_unread
from lightning_plugin.planner.search.ways import Moves, Placement, Room, Site, Span, TiledWay, WaysToTile

#: Numbers of pieces in which keys are read: a piece should be about as large as a tile of queries.
PIECES = (4, 16, 64, 256)
#: A bound is lower by this part: sums that are added up in another order differ in their last digits.
ROUNDING = 1e-9
#: Identical tiles are evaluated once if the share of different tiles is below this.
MOST_DISTINCT = 0.95


class Search:
    """The search for a plan of one network, on a device of some rates, with some lower tiers."""

    def __init__(self, network: Network, rates: Rates, lower: LowerTiers, policy: Policy = AUTO) -> None:
        self.lower = lower
        self.network = network
        self.rates = rates
        self.policy = policy
        self.intervals = Intervals(network, rates, policy)
        self.ways = WaysToTile(self.intervals, policy)
        self.budget = 0
        self.depth = 0
        #: Cuts that a segment may span.
        self.span_limit = math.inf
        self.keys_in_pieces = False
        self.copies = Copies(network, Streamed(), rates)
        self._placements: dict[tuple[int, int], tuple[Placement, Placement | None]] = {}
        #: Bytes of each map on a lower tier.
        self.lower_sizes = lower.sizes(v for n in network.order for v in n.outputs if v.is_map)

    @property
    def fixed(self) -> int:
        """Bytes that lie on the device all the time."""
        return self.network.fixed_bytes - self.copies.freed

    def stream(self, streamed: Streamed, ahead: bool = False) -> None:
        """Plan from now on with these parameters streamed, and their copies fetched ``ahead``."""
        if (streamed, ahead) != (self.copies.streamed, self.copies.ahead):
            self.copies = Copies(self.network, streamed, self.rates, ahead)

    @property
    def offloads(self) -> bool:
        """True if any map may go to a lower tier."""
        return bool(self.policy.offload) and self.lower.disk

    @property
    def cuts(self) -> list[int]:
        """The places where the order may be cut; with those that reading keys piece by piece needs."""
        return sorted(self.cut_places | self.network.key_cuts if self.keys_in_pieces else self.cut_places)

    @cached_property
    def cut_places(self) -> set[int]:
        """Every change of stage, and places inside a stage by the policy, or where little is alive."""
        must = forced_cuts(self.network)
        if self.policy.cuts == "stages":
            return must
        if callable(self.policy.cuts):
            return must | set(self.policy.cuts(self))
        return must | with_unread(self.network, low_memory_cuts(self.network, must), must)

    @cached_property
    def longest_span(self) -> int:
        """The most cuts that a segment can span: each lies within one stage."""
        cuts = sorted(self.cut_places | self.network.key_cuts)
        ends = [bisect_left(cuts, end) for end in sorted(forced_cuts(self.network))]
        return max((end - begin for begin, end in itertools.pairwise(ends)), default=0)

    # One more segment

    def span(self, begin: int, end: int) -> Span | None:
        """An interval; None if it makes nothing that is read elsewhere."""
        intervals = self.intervals
        program = intervals.program(begin, end)
        if program is None:
            return None
        read, trains = intervals.reads_and_trains(begin, end)
        before, after = intervals.alive(begin), intervals.alive(end)
        flight, plain = self.copies.flight(begin, end), intervals.plain_work(begin, end)
        return Span(begin, end, program, read, trains, before, after, flight, plain)

    def tiled_options(self, before: Partial, span: Span, front: Front) -> Iterator[Partial]:
        """A partial plan with one more tiled segment, in every way that is allowed, fits, and is not beaten by the
        ``front``."""
        reads = span.program.reads if before.offloaded else ()
        brought = [v for v in reads if v in before.offloaded]
        for seen in before.variants(bool(self.network.background)):
            for offload in self.offload_choices(before, span):
                placement = self.placement(seen, span, offload)
                if placement is None:
                    continue
                moves = self.moves(before, placement, brought)
                for ahead in (False, True) if moves else (False,):
                    depths = self.drop_depths(seen, span, moves, front)
                    for pieces in self.pieces_of(span) if depths else ():
                        yield from self.with_tiled(seen, span, moves, ahead, pieces, depths, front)

    def offload_choices(self, before: Partial, span: Span) -> tuple[bool, ...]:
        """The choices for an interval's outputs: to stay on the device, to be offloaded, or both."""
        if self.policy.offload == "all":
            return (self.placement(before, span, True) is not None,)
        return (False, True) if self.policy.offload else (False,)

    def pieces_of(self, span: Span) -> tuple[int, ...]:
        """Numbers of pieces in which an interval may read keys."""
        if not self.keys_in_pieces or not (found := self.intervals.strips(span.begin, span.end)):
            return (1,)
        most = next(iter(found.values())).positions
        return (1, *(count for count in PIECES if count <= most))

    def placement(self, before: Partial, span: Span, offload: bool) -> Placement | None:
        """The tier of an interval's outputs; None if no lower tier has room for those that are to be offloaded."""
        here, below = self.placements(span.begin, span.end)
        if not offload:
            return here
        if below is None:
            return None
        size = below.below
        tier = tier_of(self.lower, before.lower, below.maps, size, self.network, span.begin, span.end)
        return None if tier is None else below._replace(tier=tier)

    def placements(self, begin: int, end: int) -> tuple[Placement, Placement | None]:
        """Placements of an interval's outputs on the device and, if they may be offloaded, below it; the tier is found
        later."""
        found = self._placements.get((begin, end))
        if found is None:
            maps = tuple(self.intervals.stored_at(begin, end))
            here = Placement(maps, frozenset(maps), self.lower.size_on_device(maps), "device", 0, 0)
            gathered = any(v in self.network.gathered for v in maps)
            below = here._replace(below=self.lower.size(maps)) if here.size and not gathered else None
            found = self._placements[begin, end] = here._replace(device=here.size), below
        return found

    def moves(self, before: Partial, placement: Placement, brought: Sequence[Value]) -> Moves:
        """An interval's transfers to lower tiers and from there."""
        writes, reads = NONE, NONE
        if placement.below:
            writes = offload_time(self.rates, before.lower, placement.tier, placement.below)
        if brought:
            reads = fetch_time(self.rates, before.lower, {v: self.lower_sizes[v] for v in brought})
        return Moves(placement, brought, writes, reads)

    def drop_depths(self, before: Partial, span: Span, moves: Moves, front: Front) -> list[int]:
        """Depths to which a segment may drop its outputs (0: not at all) that are not beaten already, however fast its
        tiles are."""
        found = []
        held = before.keeps + moves.placement.device
        once, both = self.intervals.least_seconds(span.begin, span.end, before.no_background)
        seconds = before.seconds + (1 - ROUNDING) * both
        if not front.dominates(held, seconds, before.no_background):
            found.append(0)
        if self.depth and self.may_drop(moves.placement):
            seconds += (1 - ROUNDING) * once
            for depth in range(1, self.depth + 1):
                if not front.dominates(before.keeps, seconds, before.no_background, levels(before.keeps, held, depth)):
                    found.append(depth)
        return found

    def with_tiled(
        self, before: Partial, span: Span, moves: Moves, ahead: bool, pieces: int, depths: Sequence[int], front: Front
    ) -> Iterator[Partial]:
        """Partial plans with one more tiled segment. Its transfers overlap with work if they go ``ahead``; it reads
        keys in ``pieces`` and drops its outputs to one of the ``depths``."""
        site = self.site(before, span, moves, ahead, pieces)
        if site is None:
            return
        for way in self.ways.of(site.interval, site.room, span.trains):
            for depth in depths:
                if depth and way.halo != "recompute":
                    break
                found = self.extended(before, site, way, depth, front)
                if found is not None:
                    yield found

    def site(self, before: Partial, span: Span, moves: Moves, ahead: bool, pieces: int) -> Site | None:
        """The surroundings of one more segment; None if there is no room to recompute its inputs."""
        intervals, placement, begin, end = self.intervals, moves.placement, span.begin, span.end
        offloads, ends, back, again = placement.below > 0, 0, before.back, 0
        if span.trains:
            offloaded = before.offloaded | placement.maps if offloads else before.offloaded
            ends = intervals.cotangent_bytes(begin, before.offloaded) + intervals.cotangent_bytes(end, offloaded)
        if before.dropped:
            back -= sum(d.size for d in before.dropped if not d.maps.isdisjoint(span.before))
            again = recompute_peak(still_needed(before.dropped, span.read), span.read)
        room = Room(self.budget - self.fixed - before.held - span.flight, placement.device - back, ends)
        if room.ends + again > room.free:
            return None
        copied = frozenset(moves.brought)
        if self.lower.half_on_device:
            copied = frozenset(v for v in span.read if not is_given(v))
        interval = TiledInterval(begin, end, copied, offloads, ahead, pieces, before.no_background)
        keys = NONE
        if moves.brought and (cut := intervals.strips(begin, end)):
            keys = fetch_time(self.rates, before.lower, self.lower.sizes(v for v in moves.brought if v in cut))
        return Site(span, interval, placement, room, again, moves.writes, moves.reads, keys)

    def may_drop(self, placement: Placement) -> bool:
        """True if a segment that recomputes its halos may drop its outputs."""
        stored = placement.stored
        return (
            self.network.trains
            and bool(stored)
            and not placement.below
            and not any(v in self.network.gathered for v in stored)
        )

    def extended(self, before: Partial, site: Site, way: TiledWay, drop: int, front: Front) -> Partial | None:
        """A partial plan with one more tiled segment, which drops its outputs to depth ``drop``; None if it is
        beaten."""
        interval, placement, span = site.interval, site.placement, site.span
        dropped = before.dropped
        again: tuple[Dropped, ...] = ()
        if drop:
            once = way.forward[1].work, way.recompute_seconds(site.reads, interval.ahead)
            mine = Dropped(placement.maps, placement.size, way.forward[1].bytes, span.read, drop, *once)
            dropped, again = (*dropped, mine), (mine, *recomputed_in_passing(still_needed(dropped, span.read), drop))
        extra = way.work - span.plain + sum(d.work for d in again)
        reads = site.reads + site.keys.times(way.forward[0].tiles - 1)
        back = None if way.backward is None else way.backward[1].seconds
        waiting = self.copies.waiting(interval.begin, interval.end, way.forward[1].seconds, back)
        seconds = way.with_transfers(site.writes, reads, interval.ahead) + waiting + sum(d.seconds for d in again)
        keeps = before.keeps + way.carried + (0 if drop else placement.device)
        after = levels(keeps, keeps + placement.size, drop) if drop else ()
        if front.dominates(keeps, before.seconds + seconds, before.no_background, after):
            return None
        flight = span.flight
        base = before.held + self.fixed + flight
        peak = max(way.peak, site.room.ends + site.recompute_bytes)
        return Partial(
            keeps,
            before.seconds + seconds,
            max(before.peak, before.held + flight + peak),
            before.offloaded | placement.maps if interval.offloads else before.offloaded,
            before.lower.with_maps(placement.tier, placement.maps, placement.below),
            before.extra + extra,
            partial(self.tiled_segment, site, way, drop, base, peak, seconds, extra),
            before,
            dropped,
            before.back,
            no_background=before.no_background,
        ).at(span.after)

    def evaluates_once(self, interval: TiledInterval, way: TiledWay) -> bool:
        """True if many tiles of forward are identical to others."""
        if way.halo != "recompute" or interval.pieces > 1:
            return False
        return self.intervals.distinct_share(interval, way.forward[0]) < MOST_DISTINCT

    def tiled_segment(
        self, site: Site, way: TiledWay, drop: int, base: int, peak: int, seconds: float, extra: float
    ) -> SegmentPlan:  # fmt: skip
        """The plan of a tiled segment; ``base`` are the bytes that are live beside it."""
        interval, placement = site.interval, site.placement
        plain, targets = site.span.plain, site.span.program.targets
        return SegmentPlan(
            targets=tuple(self.network.place[t.node.serial] for t in targets),
            forward=way.forward[0],
            backward=(way.backward or way.forward)[0],
            tier=placement.tier,
            halo=way.halo,
            half=self.lower.half_on_device or (interval.offloads and self.lower.half),
            ahead=interval.ahead,
            drop=drop,
            pieces=interval.pieces,
            alike=self.evaluates_once(interval, way),
            path=self.intervals.path(interval.begin, interval.end),
            forecast=SegmentForecast(
                stored_bytes=placement.size + way.carried,
                forward_bytes=base + way.forward_bytes,
                backward_bytes=base + peak,
                seconds=seconds,
                recompute=max(0.0, extra / plain) if plain else 0.0,
                copied_bytes=self.copies.copied(interval.begin, interval.end),
            ),
        )

    def with_kept(self, before: Partial, begin: int, end: int) -> Partial | None:
        """A partial plan with one more segment that runs whole; None if it does not fit."""
        network, intervals = self.network, self.intervals
        if still_needed(before.dropped, {v for n in network.order[begin:end] for v in n.maps}):
            return None  # autograd would hold on to dropped maps
        brought = {v: v.bytes for n in network.order[begin:end] for v in n.maps if v in before.offloaded}
        flight = self.copies.flight_of_kept(begin, end)
        base = before.held + sum(brought.values()) + intervals.image_bytes_read_first(begin, end)
        held = base + (intervals.saved_bytes(begin, end) if network.trains else 0)
        tiled_before = network.trains and before.piece and not before.keep
        ends = intervals.cotangent_bytes(begin, before.offloaded) if tiled_before else 0
        work = intervals.kept_peak(begin, end)
        most = max(base + work, held) + ends + flight
        if most + self.fixed > self.budget:
            return None
        brings = fetch_time(self.rates, before.lower, self.lower.sizes(brought)).times(4 if network.trains else 1)
        work_seconds = intervals.kept_seconds(begin, end)
        seconds = brings.with_work(work_seconds, ahead=False)
        parts = (work_seconds / 3, 2 * work_seconds / 3) if network.trains else (work_seconds, None)
        seconds += self.copies.waiting(begin, end, *parts)
        forecast = SegmentForecast(
            stored_bytes=held - before.held,
            forward_bytes=held + self.fixed,
            backward_bytes=most + self.fixed,
            seconds=seconds,
            copied_bytes=self.copies.copied(begin, end),
        )
        done = replace(
            before,
            keeps=held - before.back,
            seconds=before.seconds + seconds,
            peak=max(before.peak, most),
            piece=partial(self.kept_segment, begin, end, forecast),
            before=before,
            keep=True,
            no_background=bool(network.background),
        )
        return done.at(intervals.alive(end))

    def kept_segment(self, begin: int, end: int, forecast: SegmentForecast) -> SegmentPlan:
        """The plan of a kept segment."""
        network, grid = self.network, self.intervals.one_tile(begin)
        return SegmentPlan(
            targets=tuple(network.place[n.serial] for n in network.order[begin:end]),
            forward=grid,
            backward=grid,
            keep=True,
            path=self.intervals.path(begin, end),
            forecast=forecast,
        )

    # The search

    def run(self, budget: int) -> Plan | None:
        """The best plan; None if none keeps the budget by the estimate.

        If a lower tier can take maps, they are dropped to depth 1 at most: deeper drops save little beside it. Else
        they are dropped as deep as it takes to find a plan at all. If none is found, keys may be read piece by piece.
        """
        self.budget = budget
        deepest = min(1, self.policy.drop) if self.offloads else self.policy.drop
        for self.keys_in_pieces, depth in itertools.product((False, True), range(min(1, deepest), deepest + 1)):
            if self.keys_in_pieces and not self.network.key_cuts:
                break
            self.depth = depth
            found = self.undominated()
            if found:
                return self.plan_of(min(found, key=lambda p: (p.seconds, p.held)))
        return None

    def keep_everything(self, budget: int) -> Plan | None:
        """Everything kept, as plain PyTorch does; None if it does not fit."""
        if not self.policy.keep:
            return None
        self.budget = budget
        done = Partial(0, 0.0, 0, lower=self.copies.lower)
        for begin, end in itertools.pairwise(self.cuts):
            step = self.with_kept(done, begin, end)
            if step is None:
                return None
            done = step
        return self.plan_of(done)

    def undominated(self) -> list[Partial]:
        """All undominated plans from the image to the loss."""
        cuts = self.cuts
        stages = [self.network.stage[n.serial] for n in self.network.order]
        fronts: dict[int, Front] = {cut: Front() for cut in cuts}
        fronts[cuts[0]].add(Partial(0, 0.0, 0, lower=self.copies.lower))
        for i, begin in enumerate(cuts[:-1]):
            plans = fronts.pop(begin).plans
            for j in range(i + 1, len(cuts) if plans else 0):
                end = cuts[j]
                if j > i + 1 and stages[end - 1] != stages[begin]:
                    break
                if j - i > self.span_limit:
                    break
                span, front = self.span(begin, end), fronts[end]
                for before in plans:
                    if span is None:
                        front.add(replace(before, piece=None, before=before))
                    else:
                        for found in self.tiled_options(before, span, front):
                            front.add(found)
                    if j == i + 1 and self.policy.keep and (kept := self.with_kept(before, begin, end)) is not None:
                        front.add(kept)
            for front in fronts.values():
                front.prune()
        return fronts[cuts[-1]].plans

    def plan_of(self, best: Partial) -> Plan:
        """The plan of a partial plan that has come to the loss."""
        network = self.network
        segments = best.segments()
        at = {network.place[n.serial]: i for i, n in enumerate(network.order)}
        ends = [1 + max(at[place] for place in s.targets) for s in segments]
        total = self.intervals.plain_work(0, len(network.order))
        return Plan(
            segments=tuple(merge_kept(segments)),
            budget=self.budget,
            barriers=tuple(n.label for n in network.barriers),
            on_host=self.copies.streamed.on_host,
            on_disk=self.copies.streamed.on_disk,
            fetched_ahead=self.copies.ahead,
            forecast=Forecast(
                peak_bytes=best.peak + self.fixed,
                plain_bytes=network.plain_bytes,
                index_bytes=network.index_bytes,
                made_bytes=network.made_bytes,
                seconds=best.seconds,
                recompute=max(0.0, best.extra / total) if total else 0.0,
                fixed_bytes=self.fixed,
                streamed_bytes=sum(v.bytes for v in self.copies.tiers),
                traffic_bytes=self.copies.traffic(itertools.pairwise([0, *ends])),
            ),
        )
