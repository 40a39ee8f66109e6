"""The fastest plan that keeps a budget: dynamic programming over cuts.

The network is cut into intervals of its order (`network`). Each is run tiled, with what is alive at its end stored, or
*kept*: run whole, with what its operators save left in memory, as plain PyTorch does. Going through the cuts from the
image on, a partial plan is a pair (bytes held so far, seconds so far), and of these only the ones that no other beats
in both are carried on. Bytes held only grow towards the loss, and backward frees them in reverse, so a segment's
tiles have to fit beside what is held up to it, and beside the cotangents of its ends; that is checked when it is added,
with the coarsest grid that fits. What is dropped (see [Note: dropped] in `execute.again`) is an exception: it is held
from where it is made to where the last segment that has it come back begins, and not beyond.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Value
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.cost import Cost
from lightning_plugin.planner.interval import COUNTS, Intervals, Where
from lightning_plugin.planner.network import Network, is_given
from lightning_plugin.planner.partial import (
    Dropped,
    Partial,
    merge_kept,
    merged_counts,
    most_of,
    still_needed,
    undominated,
)
from lightning_plugin.planner.policies import POLICIES, Policy
from lightning_plugin.planner.rates import Rates

#: Halos that cost less than this share of a segment's work are not worth sharing.
WORTH_SHARING = 0.03
#: Cuts inside stages that are considered; of more, those where least is alive.
MOST_CUTS = 48
#: Operators of one segment, beyond those between two cuts: the halo grows with every one of them.
MOST_OPERATORS = 96


@dataclass(frozen=True)
class Lower:
    """The tiers below the device: how much the host may hold (None where there is no host below), and whether the disk
    may be used. ``half`` allows maps there to be kept as bfloat16, which loses digits."""

    host: int | None = None
    disk: bool = True
    half: bool = False

    def tier(self, used: int, size: int) -> str | None:
        """Where the next map goes if it leaves the device."""
        if self.host is not None and used + size <= self.host:
            return "host"
        return "disk" if self.disk else None

    def size(self, maps: list[Value]) -> int:
        """What maps take on a lower tier."""
        return sum(v.bytes * 2 // v.dtype.itemsize if self.half and v.dtype.itemsize > 2 else v.bytes for v in maps)


@dataclass(frozen=True)
class Part:
    """How a segment's figure was made: ``base`` bytes of what lies there, and ``bytes`` that the model predicted
    without any lesson."""

    begin: int
    end: int
    how: str
    base: int
    bytes: int


@dataclass(frozen=True)
class Tiled:
    """One way to run an interval tile by tile."""

    halo: str
    forward: tuple[Grid, Cost]
    backward: tuple[Grid, Cost] | None
    ends: int
    stored: int

    @property
    def carried(self) -> int:
        return self.forward[1].carried if self.backward is not None else 0

    @property
    def seconds(self) -> float:
        return self.forward[1].seconds + (self.backward[1].seconds if self.backward else 0.0)

    def with_transfers(self, writes: float, reads: float, ahead: bool, drop: bool) -> float:
        """The seconds of both passes, given those of what is written once and read once.

        Backward reads the cotangents of what was written, and its input again, and adds to the cotangents of that. What
        is dropped is made twice.
        """
        passes = [(self.forward[1].seconds, writes + reads)] * (2 if drop else 1)
        if self.backward is not None:
            passes.append((self.backward[1].seconds, writes + 3 * reads))
        return sum(max(work, way) if ahead else work + way for work, way in passes)

    @property
    def forward_bytes(self) -> int:
        """What forward holds beyond what was held before: what it stores, and its tiles."""
        return self.stored + self.carried + self.forward[1].bytes

    @property
    def backward_bytes(self) -> int:
        """What backward holds: its tiles beside the cotangents of its ends. What was stored here is gone by then, with
        the last segment that read it."""
        return self.carried + self.ends + self.backward[1].bytes if self.backward else 0

    @property
    def peak(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)

    @property
    def work(self) -> float:
        return self.forward[1].work + (self.backward[1].work if self.backward else 0.0)


@dataclass(frozen=True)
class Room:
    """Bytes that are free for a segment, and what of them is taken: by what it stores in forward, by the cotangents of
    its ends in backward."""

    free: int
    stored: int
    ends: int


class Search:
    def __init__(self, network: Network, rates: Rates, lower: Lower, policy: Policy = POLICIES["auto"]) -> None:
        self.lower = lower
        self.network = network
        self.rates = rates
        self.policy = policy
        self.intervals = Intervals(network, rates, policy)
        self.budget = 0
        self._parts: dict[SegmentPlan, list[Part]] = {}
        self._pieces: dict[Plan, list[list[SegmentPlan]]] = {}

    @cached_property
    def cuts(self) -> list[int]:
        """The places where the order may be cut: every change of stage, and inside a stage where little is alive."""
        order, stage, alive = self.network.order, self.network.stage, self.network.alive
        end = len(order)
        must = {0, end} | {i for i in range(1, end) if stage[order[i].serial] != stage[order[i - 1].serial]}
        if self.policy.cuts == "stages":
            return sorted(must)
        size = [sum(v.bytes for v in maps if not is_given(v)) for maps in alive]
        valley = [
            i
            for i in range(1, end)
            if i not in must
            and size[i] <= size[i - 1]
            and (size[i] < size[i + 1] or (size[i] <= size[i + 1] and self.heavy(i)))
        ]
        if len(valley) > MOST_CUTS:
            valley = sorted(valley, key=lambda i: size[i])[:MOST_CUTS]
        return sorted(must | set(valley))

    def heavy(self, cut: int) -> bool:
        """Whether real work begins at a cut; a cut before an activation would only store what follows from less."""
        return self.network.order[cut].op.kind in ("window", "resample")

    # One more segment

    def options(self, before: Partial, begin: int, end: int, first: bool) -> Iterator[Partial]:
        """A partial plan with one more segment, in every way that is allowed and fits."""
        if self.intervals.program(begin, end) is None:
            yield replace(before, segment=None, before=before)
        else:
            for spill in (False, True) if self.policy.spill else (False,):
                for ahead in (False, True):
                    yield from self.tiled(before, begin, end, spill, ahead)
        if first and self.policy.keep:
            found = self.kept(before, begin, end)
            if found is not None:
                yield found

    def tiled(self, before: Partial, begin: int, end: int, spill: bool, ahead: bool) -> Iterator[Partial]:
        """One more segment, tiled; with ``spill``, what it stores goes to a lower tier, with ``ahead`` while other
        tiles are computed."""
        network, intervals = self.network, self.intervals
        stored = intervals.stored_at(begin, end)
        size = sum(v.bytes for v in stored)
        below = self.lower.size(stored)
        tier: str | None = self.lower.tier(before.lower, below) if spill else "device"
        if tier is None or (spill and (not size or any(id(v) in network.gathered for v in stored))):
            return
        held = before.held + (0 if spill else size)
        spilled = before.spilled | {id(v) for v in stored} if spill else before.spilled
        program = intervals.work_of(begin, end)
        brought = [v for v in program.reads if id(v) in before.spilled]
        if ahead and not spill and not brought:
            return
        where = Where(begin, end, frozenset(id(v) for v in brought), spill, ahead)
        comes_back = still_needed(before.dropped, {id(v) for v in program.reads})
        alive = intervals.alive(begin)
        gone = sum(d.size for d in before.dropped if d.maps.isdisjoint(alive))
        writes = self.one_way(tier, below) if spill else 0.0
        reads = self.one_way("disk" if self.lower.host is None else "host", self.lower.size(brought))
        trains = any(t.requires_grad for t in program.targets)
        room = Room(
            self.budget - network.fixed_bytes - before.held,
            (0 if spill else size) - gone,
            intervals.ends(begin, before.spilled) + intervals.ends(end, spilled) if trains else 0,
        )
        again = max((d.tiles for d in comes_back), default=0)
        if room.ends + again > room.free:
            return
        for way, drop in self.placed(where, room, trains, stored):
            plain = intervals.plain_work(begin, end)
            extra = way.work - plain + (way.forward[1].work if drop else 0)
            seconds = way.with_transfers(writes, reads, ahead, drop)
            base = before.held + network.fixed_bytes
            peak = max(way.peak, room.ends + again)
            segment = SegmentPlan(
                targets=tuple(network.place[t.node.serial] for t in program.targets),
                forward=way.forward[0],
                backward=(way.backward or way.forward)[0],
                tier=tier,
                path=intervals.path(begin, end),
                stored_bytes=size + way.carried,
                forward_bytes=base + way.forward_bytes,
                backward_bytes=base + peak,
                seconds=seconds,
                recompute=extra / plain if plain else 0.0,
                halo=way.halo,
                half=spill and self.lower.half,
                ahead=ahead,
                drop=drop,
            )
            self._parts[segment] = list(self.parts(where, way, base))
            dropped = before.dropped
            if drop:
                maps, read = (frozenset(map(id, vs)) for vs in (stored, program.reads))
                dropped = (*dropped, Dropped(maps, size, way.forward[1].bytes, read))
            yield Partial(
                held + way.carried,
                before.seconds + seconds,
                max(before.peak, before.held + peak),
                spilled,
                before.lower + (below + size if spill else 0),
                before.extra + extra,
                segment,
                before,
                dropped,
            ).at(intervals.alive(end))

    def placed(self, where: Where, room: Room, trains: bool, stored: list[Value]) -> Iterator[tuple[Tiled, bool]]:
        """The ways to run a segment, each with whether what it stores is dropped."""
        network = self.network
        may = self.policy.drop and network.trains and not where.leaving and stored
        for way in self.ways(where, room, trains):
            yield way, False
            if may and way.halo == "recompute" and not any(id(v) in network.gathered for v in stored):
                yield way, True

    def ways(self, where: Where, room: Room, trains: bool) -> Iterator[Tiled]:
        """Tiles that compute their halos twice, and where that costs something, tiles that share them."""
        intervals = self.intervals
        plain = intervals.plain_work(where.begin, where.end)
        halos = self.policy.halos if self.policy.shape != "whole" else ("recompute",)
        recompute = self.recomputed(where, room, trains) if "recompute" in halos else None
        if recompute is not None:
            yield recompute
        if "share" not in halos or where.ahead:  # the tiles of a scan are not known ahead
            return
        if recompute is not None and recompute.work < (2 if trains else 1) * plain * (1 + WORTH_SHARING):
            return
        found = intervals.scans(where, room.free - max(room.stored, room.ends), trains)
        if found is not None:
            grid, forward, backward = found
            yield Tiled("share", (grid, forward), (grid, backward) if trains else None, room.ends, room.stored)
        elif "recompute" not in halos:
            whole = self.recomputed(where, room, trains)  # what cannot share has to do without
            if whole is not None:
                yield whole

    def recomputed(self, where: Where, room: Room, trains: bool) -> Tiled | None:
        forward = self.intervals.cheapest(where, room.free - room.stored, False)
        if forward is None:
            return None
        if not trains:
            return Tiled("recompute", forward, None, 0, room.stored)
        backward = self.intervals.cheapest(where, room.free - room.ends, True)
        if backward is None:
            return None
        if self.policy.same and forward[0] != backward[0]:
            forward = backward[0], self.intervals.cost(where, backward[0], False)
        return Tiled("recompute", forward, backward, room.ends, room.stored)

    @staticmethod
    def parts(where: Where, way: Tiled, base: int) -> Iterator[Part]:
        kind = "scan " if way.halo == "share" else "ahead " if where.ahead else ""
        base += way.carried
        yield Part(where.begin, where.end, f"{kind}forward", base + way.stored, way.forward[1].untaught)
        if way.backward is not None:
            yield Part(where.begin, where.end, f"{kind}backward", base + way.ends, way.backward[1].untaught)

    def one_way(self, tier: str, size: int) -> float:
        """Seconds that maps take to a lower tier, or from there."""
        return size / (self.rates.host if tier == "host" else self.rates.disk)

    def kept(self, before: Partial, begin: int, end: int) -> Partial | None:
        """One more segment, run whole."""
        network, intervals = self.network, self.intervals
        if still_needed(before.dropped, {id(v) for n in network.order[begin:end] for v in n.maps}):
            return None  # what is kept would hold on to what was dropped
        brought = {id(v): v.bytes for n in network.order[begin:end] for v in n.maps if id(v) in before.spilled}
        base = before.held + sum(brought.values()) + intervals.given_whole(begin, end)
        held = base + (network.saved_bytes(begin, end) if network.trains else 0)
        tiled_before = network.trains and before.segment and not before.segment.keep
        ends = intervals.ends(begin, before.spilled) if tiled_before else 0
        work = intervals.kept_peak(begin, end)
        most = max(base + int(work * intervals.lessons.get((begin, end, "kept"), 1.0)), held) + ends
        if most + network.fixed_bytes > self.budget:
            return None
        there = "disk" if self.lower.host is None else "host"
        seconds = intervals.kept_seconds(begin, end) + (4 if network.trains else 1) * self.one_way(
            there, sum(brought.values())
        )
        segment = SegmentPlan(
            targets=tuple(network.place[n.serial] for n in network.order[begin:end]),
            forward=intervals.one_tile(begin),
            backward=intervals.one_tile(begin),
            keep=True,
            path=intervals.path(begin, end),
            stored_bytes=held - before.held,
            forward_bytes=held + network.fixed_bytes,
            backward_bytes=most + network.fixed_bytes,
            seconds=seconds,
        )
        self._parts[segment] = [Part(begin, end, "kept", base + ends + network.fixed_bytes, work)]
        peak = max(before.peak, most)
        done = replace(before, held=held, seconds=before.seconds + seconds, peak=peak, segment=segment, before=before)
        return done.at(intervals.alive(end))

    # The search

    def run(self, budget: int) -> Plan | None:
        """The best plan, or None where none keeps the budget as far as the cost model knows."""
        self.budget = budget
        found = []
        for only in COUNTS if self.policy.uniform else (None,):
            self.intervals.only = only
            found += self.through()
        return self.finish(min(found, key=lambda p: (p.seconds, p.held))) if found else None

    def whole(self, budget: int) -> Plan | None:
        """Everything kept, as plain PyTorch does, where that fits: it is found at once, and what tiles in a cache might
        win over it is not looked for."""
        if not self.policy.keep or self.policy.uniform:
            return None
        self.budget = budget
        done = Partial(0, 0.0, 0)
        for begin, end in itertools.pairwise(self.cuts):
            step = self.kept(done, begin, end)
            if step is None:
                return None
            done = step
        return self.finish(done)

    def through(self) -> list[Partial]:
        """From the image to the loss."""
        cuts = self.cuts
        stages = [self.network.stage[n.serial] for n in self.network.order]
        front: dict[int, list[Partial]] = {0: [Partial(0, 0.0, 0)]}
        for i, begin in enumerate(cuts[:-1]):
            for before in front.get(begin, ()):
                for j in range(i + 1, len(cuts)):
                    end = cuts[j]
                    if j > i + 1 and (stages[end - 1] != stages[begin] or end - begin > MOST_OPERATORS):
                        break
                    front.setdefault(end, []).extend(self.options(before, begin, end, j == i + 1))
            front.pop(begin, None)
            for cut in front:
                front[cut] = undominated(front[cut])
        return front.get(cuts[-1], [])

    def learn(self, plan: Plan, forward: Mapping[int, int], backward: Mapping[int, int]) -> None:
        """Compare what the model said of a plan of this search with what its rehearsal found."""
        for i, pieces in enumerate(self._pieces[plan]):
            for piece in pieces:
                for part in self._parts[piece]:
                    true = max(forward[i], backward.get(i, 0)) if part.how == "kept" else (
                        forward if part.how.endswith("forward") else backward
                    ).get(i)  # fmt: skip
                    # A kept segment's peak is one of its pieces'; what the model says of the others is not refuted.
                    if true is None or part.bytes <= 0 or (part.how == "kept" and piece is not most_of(pieces)):
                        continue
                    ratio = (true - part.base) / part.bytes
                    self.intervals.lessons[part.begin, part.end, part.how] = min(2.0, max(0.5, 1.002 * ratio))

    def finish(self, best: Partial) -> Plan:
        network = self.network
        pieces = best.segments()
        segments = merge_kept(pieces)
        total = self.intervals.plain_work(0, len(network.order))
        plan = Plan(
            segments=tuple(segments),
            budget=self.budget,
            peak_bytes=best.peak + network.fixed_bytes,
            plain_bytes=network.plain_bytes,
            index_bytes=network.index_bytes,
            seconds=best.seconds,
            recompute=best.extra / total if total else 0.0,
            fixed_bytes=network.fixed_bytes,
            barriers=tuple(n.label for n in network.barriers),
        )
        rest = iter(pieces)
        self._pieces[plan] = [[next(rest) for _ in range(count)] for count in merged_counts(pieces)]
        return plan
