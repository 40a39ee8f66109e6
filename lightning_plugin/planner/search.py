"""The fastest plan that keeps a budget: dynamic programming over cuts.

The network is cut into intervals of its order (`network`). Each is run tiled, with what is alive at its end stored, or
*kept*: run whole, with what its operators save left in memory, as plain PyTorch does. Going through the cuts from the
image on, a partial plan is a pair (bytes held so far, seconds so far), and of these only the ones that no other beats
in both are carried on. Bytes held only grow towards the loss, and backward frees them in reverse, so a segment's
tiles have to fit beside what is held up to it, and beside the cotangents of its ends; that is checked when it is added,
with the coarsest grid that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from lightning_plugin.boxes import Box, Grid, reference_of
from lightning_plugin.execute.program import Program, Target
from lightning_plugin.graph import Value
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.cost import Cost, Coster
from lightning_plugin.planner.network import Network, is_given
from lightning_plugin.planner.rates import Rates
from lightning_plugin.rules.base import ReduceOp

#: Tiles on the longest axis that are tried; more come in steps of a third, as a finer choice changes little.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Partial:
    """A plan up to a cut: what it holds, what it costs, and how it got there."""

    held: int
    seconds: float
    peak: int
    spilled: frozenset[int] = frozenset()
    lower: int = 0
    extra: float = 0.0
    segment: SegmentPlan | None = None
    before: Partial | None = None

    def segments(self) -> list[SegmentPlan]:
        found: list[SegmentPlan] = []
        step: Partial | None = self
        while step is not None:
            if step.segment is not None:
                found.append(step.segment)
            step = step.before
        return found[::-1]


#: What a search asks again and again.
MEMOIZED = ("program", "middle", "grids", "cost", "kept_peak", "plain_work", "kept_seconds", "given_whole")


@dataclass(frozen=True)
class Lower:
    """The tiers below the device: how much the host may hold (None where there is no host below), and whether the disk
    may be used."""

    host: int | None = None
    disk: bool = True

    def tier(self, used: int, size: int) -> str | None:
        """Where the next map goes if it leaves the device."""
        if self.host is not None and used + size <= self.host:
            return "host"
        return "disk" if self.disk else None


@dataclass(frozen=True)
class Part:
    """How a segment's figure was made: ``base`` bytes of what lies there, and ``bytes`` that the model predicted
    without any lesson."""

    begin: int
    end: int
    how: str
    base: int
    bytes: int


class Search:
    def __init__(self, network: Network, rates: Rates, lower: Lower, most_cuts: int = 48) -> None:
        self.lower = lower
        self.network = network
        self.rates = rates
        self.budget = 0
        #: What rehearsals have taught: true bytes of an interval's tiles for each byte predicted, forward and backward.
        self.lessons: dict[tuple[int, int, str], float] = {}
        self._parts: dict[SegmentPlan, list[Part]] = {}
        self._pieces: dict[Plan, list[list[SegmentPlan]]] = {}
        self.coster = Coster(network, rates)
        self.most_cuts = most_cuts
        for name in MEMOIZED:  # for this search alone, so that nothing outlives it
            setattr(self, name, cache(getattr(self, name)))

    @cached_property
    def cuts(self) -> list[int]:
        """The places where the order may be cut: every change of stage, and inside a stage where little is alive."""
        order, stage, alive = self.network.order, self.network.stage, self.network.alive
        end = len(order)
        must = {0, end} | {i for i in range(1, end) if stage[order[i].serial] != stage[order[i - 1].serial]}
        size = [sum(v.bytes for v in maps if not is_given(v)) for maps in alive]
        valley = [
            i
            for i in range(1, end)
            if i not in must
            and size[i] <= size[i - 1]
            and (size[i] < size[i + 1] or (size[i] <= size[i + 1] and self.heavy(i)))
        ]
        if len(valley) > self.most_cuts:
            valley = sorted(valley, key=lambda i: size[i])[: self.most_cuts]
        return sorted(must | set(valley))

    def heavy(self, cut: int) -> bool:
        """Whether real work begins at a cut; a cut before an activation would only store what follows from less."""
        return self.network.order[cut].op.kind in ("window", "resample")

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

    def grids(self, begin: int, end: int) -> list[Grid]:
        """Grids from coarse to fine, of tiles about as high as they are wide."""
        program = self.program(begin, end)
        assert program is not None
        extents = [t.map.space.extent for t in program.targets]
        reference = reference_of(extents)
        longest = max(reference)
        found: list[Grid] = []
        for count in COUNTS:
            if count > longest:
                break
            side = longest / count
            grid = Grid(tuple(max(1, round(size / side)) for size in reference))
            half = Grid((grid.counts[0], *(1 for _ in grid.counts[1:]))) if len(grid.counts) > 1 else grid
            for g in (half, grid) if count in (2, 3) else (grid,):
                if g not in found:
                    found.append(g)
        return found

    def cost(self, begin: int, end: int, grid: Grid, backward: bool, spilled: frozenset[int], leaving: bool) -> Cost:
        program = self.program(begin, end)
        assert program is not None
        self.coster.spilled, self.coster.leaving = spilled, leaving
        return self.coster.backward(program, grid) if backward else self.coster.forward(program, grid)

    def middle(self, begin: int, end: int, grid: Grid, backward: bool, spilled: frozenset[int], leaving: bool) -> int:
        """The bytes of a tile in the middle: no more than `cost` says, and quickly known."""
        program = self.program(begin, end)
        assert program is not None
        self.coster.spilled, self.coster.leaving = spilled, leaving
        extents = [t.map.space.extent for t in program.targets]
        need = program.boxes(grid.owned(grid.ends(extents), [c // 2 for c in grid.counts]))
        return self.coster.backward_peak(program, need) if backward else self.coster.forward_peak(program, need)

    def ends(self, cut: int, spilled: frozenset[int]) -> int:
        """The cotangents, on the device, of what is alive at a cut."""
        return self.coster.cotangent([v for v in self.network.alive[cut] if not is_given(v) and id(v) not in spilled])

    def finest(
        self, begin: int, end: int, room: int, backward: bool, spilled: frozenset[int], leaving: bool
    ) -> tuple[Grid, Cost] | None:
        """The cheapest grid whose tiles fit into ``room``."""
        best: tuple[Grid, Cost] | None = None
        for grid in self.grids(begin, end):
            lesson = self.lessons.get((begin, end, "backward" if backward else "forward"), 1.0)
            if lesson * self.middle(begin, end, grid, backward, spilled, leaving) > room:
                continue
            cost = self.cost(begin, end, grid, backward, spilled, leaving)
            if lesson != 1.0:
                cost = replace(cost, bytes=int(cost.bytes * lesson), predicted=cost.bytes)
            if cost.bytes <= room and (best is None or cost.seconds < best[1].seconds):
                best = (grid, cost)
            if best is not None and cost.seconds > 1.5 * best[1].seconds:
                break
        return best

    def transfer(self, tier: str, size: int) -> float:
        """Seconds of a map's way to a lower tier and back: written, read twice, its cotangent added and read."""
        rate = self.rates.host if tier == "host" else self.rates.disk
        return size * (6 if self.network.trains else 2) / rate

    def tiled(self, before: Partial, begin: int, end: int, spill: bool) -> Partial | None:
        """One more segment, tiled; with ``spill``, what it stores goes to a lower tier."""
        network = self.network
        program = self.program(begin, end)
        if program is None:
            return replace(before, segment=None, before=before)
        stored = self.stored_at(begin, end)
        size = sum(v.bytes for v in stored)
        tier: str | None = self.lower.tier(before.lower, size) if spill else "device"
        if tier is None or (spill and (not size or any(id(v) in network.gathered for v in stored))):
            return None
        held = before.held + (0 if spill else size)
        spilled = before.spilled | {id(v) for v in stored} if spill else before.spilled
        reads = frozenset(id(v) for v in program.reads if id(v) in before.spilled)
        available = self.budget - network.fixed_bytes - held
        forward = self.finest(begin, end, available, False, reads, spill)
        if forward is None:
            return None
        seconds, peak, grid = forward[1].seconds, forward[1].bytes, forward[0]
        seconds += self.transfer(tier, size) if spill else 0.0
        trains = any(t.requires_grad for t in program.targets)
        if trains:
            ends = self.ends(begin, before.spilled) + self.ends(end, spilled)
            found = self.finest(begin, end, available - ends, True, reads, spill)
            if found is None:
                return None
            backward = found
            seconds += backward[1].seconds
            peak = max(peak, backward[1].bytes + ends)
        else:
            backward = forward
        plain = self.plain_work(begin, end)
        extra = forward[1].work + (backward[1].work if trains else 0) - plain
        segment = SegmentPlan(
            targets=tuple(network.place[t.node.serial] for t in program.targets),
            forward=grid,
            backward=backward[0],
            tier=tier,
            path=self.path(begin, end),
            stored_bytes=size,
            forward_bytes=held + forward[1].bytes + network.fixed_bytes,
            backward_bytes=held + peak + network.fixed_bytes,
            seconds=seconds,
            recompute=extra / plain if plain else 0.0,
        )
        base = held + network.fixed_bytes
        parts = [Part(begin, end, "forward", base, forward[1].untaught)]
        if trains:
            parts.append(Part(begin, end, "backward", base + ends, backward[1].untaught))
        self._parts[segment] = parts
        lower = before.lower + (2 * size if spill else 0)
        return Partial(
            held,
            before.seconds + seconds,
            max(before.peak, held + peak),
            spilled,
            lower,
            before.extra + extra,
            segment,
            before,
        )

    def kept(self, before: Partial, begin: int, end: int) -> Partial | None:
        """One more segment, run whole."""
        network = self.network
        brought = {id(v): v.bytes for n in network.order[begin:end] for v in n.maps if id(v) in before.spilled}
        base = before.held + sum(brought.values()) + self.given_whole(begin, end)
        held = base + (network.saved_bytes(begin, end) if network.trains else 0)
        ends = self.ends(begin, before.spilled) if network.trains and before.segment and not before.segment.keep else 0
        work = self.kept_peak(begin, end)
        most = max(base + int(work * self.lessons.get((begin, end, "kept"), 1.0)), held) + ends
        if most + network.fixed_bytes > self.budget:
            return None
        seconds = self.kept_seconds(begin, end)
        segment = SegmentPlan(
            targets=tuple(network.place[n.serial] for n in network.order[begin:end]),
            forward=_one(network, begin),
            backward=_one(network, begin),
            keep=True,
            path=self.path(begin, end),
            stored_bytes=held - before.held,
            forward_bytes=held + network.fixed_bytes,
            backward_bytes=most + network.fixed_bytes,
            seconds=seconds,
        )
        self._parts[segment] = [Part(begin, end, "kept", base + ends + network.fixed_bytes, work)]
        peak = max(before.peak, most)
        return Partial(
            held, before.seconds + seconds, peak, before.spilled, before.lower, before.extra, segment, before
        )

    def kept_peak(self, begin: int, end: int) -> int:
        self.coster.spilled, self.coster.leaving = frozenset(), False
        return self.coster.kept_peak(begin, end)

    def kept_seconds(self, begin: int, end: int) -> float:
        """Forward, and backward with respect to parameters and, where they need it, inputs."""
        total = 0.0
        for n in self.network.order[begin:end]:
            times = 1 if not self.network.trains else 3 if any(v.requires_grad for v in n.maps) else 2
            total += 3 * self.rates.call + times * self.coster.time(n)
        return total

    def given_whole(self, begin: int, end: int) -> int:
        """Images that a kept segment is the first to read whole and that are not on the device yet."""
        network = self.network
        earlier = {id(v) for n in network.order[:begin] for v in n.maps}
        seen = {id(v): v for n in network.order[begin:end] for v in n.maps if is_given(v) and id(v) not in earlier}
        self.coster.spilled, self.coster.leaving = frozenset(), False
        return sum(self.coster.read_bytes(v, Box.whole(v.space.extent)) for v in seen.values())

    def plain_work(self, begin: int, end: int) -> float:
        profiles = [self.network.profiles[n.serial] for n in self.network.order[begin:end]]
        return float(sum(p.flops or p.traffic for p in profiles))

    def path(self, begin: int, end: int) -> str:
        """The modules of an interval, first to last."""
        paths = [n.path or n.name for n in self.network.order[begin:end]]
        return paths[0] if paths[0] == paths[-1] else f"{paths[0]} … {paths[-1]}"

    def run(self, budget: int) -> Plan | None:
        """The best plan, or None where none keeps the budget as far as the cost model knows."""
        self.budget = budget
        network, cuts = self.network, self.cuts
        front: dict[int, list[Partial]] = {0: [Partial(0, 0.0, 0)]}
        for i, begin in enumerate(cuts[:-1]):
            for before in front.get(begin, ()):
                for j in range(i + 1, len(cuts)):
                    end = cuts[j]
                    if (
                        j > i + 1
                        and network.stage[network.order[end - 1].serial] != network.stage[network.order[begin].serial]
                    ):
                        break
                    options = [self.tiled(before, begin, end, False), self.tiled(before, begin, end, True)]
                    if j == i + 1:
                        options.append(self.kept(before, begin, end))
                    for option in options:
                        if option is not None:
                            front.setdefault(end, []).append(option)
            front.pop(begin, None)
            for cut in front:
                front[cut] = undominated(front[cut])
        done = front.get(cuts[-1], [])
        if not done:
            return None
        best = min(done, key=lambda p: (p.seconds, p.held))
        return self.finish(best)

    def learn(self, plan: Plan, forward: Mapping[int, int], backward: Mapping[int, int]) -> None:
        """Compare what the model said of a plan of this search with what its rehearsal found."""
        for i, pieces in enumerate(self._pieces[plan]):
            for piece in pieces:
                for part in self._parts[piece]:
                    true = max(forward[i], backward.get(i, 0)) if part.how == "kept" else (
                        forward if part.how == "forward" else backward
                    ).get(i)  # fmt: skip
                    # A kept segment's peak is one of its pieces'; what the model says of the others is not refuted.
                    if true is None or part.bytes <= 0 or (part.how == "kept" and piece is not most_of(pieces)):
                        continue
                    ratio = (true - part.base) / part.bytes
                    self.lessons[part.begin, part.end, part.how] = min(2.0, max(0.5, 1.002 * ratio))

    def finish(self, best: Partial) -> Plan:
        network = self.network
        pieces = best.segments()
        segments = merge_kept(pieces)
        total = self.plain_work(0, len(network.order))
        plan = Plan(
            segments=tuple(segments),
            budget=self.budget,
            peak_bytes=best.peak + network.fixed_bytes,
            plain_bytes=network.plain_bytes,
            index_bytes=network.index_bytes,
            seconds=best.seconds,
            recompute=best.extra / total if total else 0.0,
            barriers=tuple(n.label for n in network.barriers),
        )
        rest = iter(pieces)
        self._pieces[plan] = [[next(rest) for _ in range(count)] for count in merged_counts(pieces)]
        return plan


def most_of(pieces: Sequence[SegmentPlan]) -> SegmentPlan:
    return max(pieces, key=lambda s: s.backward_bytes)


def merged_counts(segments: Sequence[SegmentPlan]) -> list[int]:
    """How many segments each of `merge_kept`'s is made of."""
    counts: list[int] = []
    for i, s in enumerate(segments):
        if i and s.keep and segments[i - 1].keep:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts


def _one(network: Network, begin: int) -> Grid:
    v = network.order[begin].maps[0]
    return Grid((1,) * len(v.space.extent))


def undominated(plans: Sequence[Partial], most: int = 24) -> list[Partial]:
    """The plans that no other beats both in bytes and in seconds, thinned evenly where they are many."""
    found: list[Partial] = []
    for plan in sorted(plans, key=lambda p: (p.held, p.seconds)):
        if not found or plan.seconds < found[-1].seconds:
            found.append(plan)
    if len(found) > most:
        step = (len(found) - 1) / (most - 1)
        found = [found[round(i * step)] for i in range(most)]
    return found


def merge_kept(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
    """Neighbouring kept segments are one."""
    merged: list[SegmentPlan] = []
    for s in segments:
        last = merged[-1] if merged else None
        if last is not None and last.keep and s.keep:
            merged[-1] = replace(
                last,
                targets=(*last.targets, *s.targets),
                path=f"{last.path.split(' … ')[0]} … {s.path.split(' … ')[-1]}",
                stored_bytes=last.stored_bytes + s.stored_bytes,
                forward_bytes=max(last.forward_bytes, s.forward_bytes),
                backward_bytes=max(last.backward_bytes, s.backward_bytes),
                seconds=last.seconds + s.seconds,
            )
        else:
            merged.append(s)
    return merged
