"""Plans of chains: the segments of a link, the number of slots, and the number of links that are kept.

A link is planned as a network of its own, whose image is the output of the link before: run whole if that fits, else in
tiles. The rest of the room is for slots and for links that are kept; of these, and of the ways to run a link, the
fastest are taken. The time of planning does not depend on the length of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lightning_plugin.chain import Body, Chain, chains, forwards_after_run, min_forward_runs
from lightning_plugin.execute.chain import CHAIN, FIRST_LINK_PLACE
from lightning_plugin.graph import Bindings, Capture, Node, Recording, Value
from lightning_plugin.plan import ChainForecast, ChainPlan, Forecast, Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.rehearsal.rehearse import RehearsedMemory

#: A chain has enough slots that no link runs forward more often than this.
MOST_RUNS = 16
#: Steps in which the number of kept links is tried, from none to all.
STEPS = 16


@dataclass(frozen=True)
class Way:
    """A way to run a link.

    Attributes:
        segments: Its plan.
        needs: Bytes while it is pulled back, beyond its own vectors and the slots of others.
        kept: Bytes that it holds if it is kept; None if it cannot be.
        forward: Seconds of forward.
        seconds: Seconds of both directions.
    """

    segments: tuple[SegmentPlan, ...]
    needs: int
    kept: int | None
    forward: float
    seconds: float

    @staticmethod
    def of(plan: Plan, network: Network, body: Body) -> Way:
        """The figures of a rehearsed plan of a link. Forward is taken to be a third of its seconds."""
        standing = sum(v.bytes for v in body.own if network.tier_of(v) is None)
        whole = all(s.keep for s in plan.segments)
        forward = plan.seconds / 3 if network.trains else plan.seconds
        needs = max(0, plan.peak_bytes - standing)
        return Way(plan.segments, needs, plan.forecast.held_bytes if whole else None, forward, plan.seconds)


#: Finds the ways to run a link.
Ways = Callable[[Network, Body], list[Way]]


@dataclass(eq=False)
class Chains:
    """The chains of a network.

    Attributes:
        find: Finds the ways to run a link; it is asked once for each body, with the tiers of its own vectors.
        known: The ways to run the links of each chain.
        last_tiers: The tiers that `below` was last asked for.
        found: Its results for them, by the chain's node.
    """

    network: Network
    find: Ways
    known: dict[Hashable, list[Way]] = field(default_factory=dict)
    last_tiers: Mapping[Value, str] = field(default_factory=dict)
    found: dict[int, dict[int, str]] = field(default_factory=dict)

    @cached_property
    def all(self) -> list[tuple[int, Node, Chain]]:
        return list(chains(self.network.nodes))

    def __bool__(self) -> bool:
        return bool(self.all)

    def within(self, room: int, tiers: Mapping[Value, str]) -> tuple[ChainPlan, ...] | None:
        """The fastest way to run all chains within ``room`` beside their parameters; None if it is too little.
        Chains share the room for slots in proportion to the largest that each could use."""
        wanted = [op.count * op.body.entry_bytes for _, _, op in self.all]
        best: tuple[ChainPlan, ...] | None = None
        for needs in self.needs(tiers):
            left = room - needs
            shares = [left * size // max(1, sum(wanted)) for size in wanted]
            found = [
                fastest(place, node.path, op, [w for w in self.ways(place, node, op, tiers) if w.needs <= needs], share)
                for (place, node, op), share in zip(self.all, shares, strict=True)
            ]
            plans = tuple(plan for plan in found if plan is not None)
            if len(plans) == len(found) and (best is None or seconds(plans) < seconds(best)):
                best = plans
        return best

    def least(self, tiers: Mapping[Value, str]) -> tuple[ChainPlan, ...]:
        """The chains run with the least memory."""
        found = []
        for place, node, op in self.all:
            way = min(self.ways(place, node, op, tiers), key=lambda way: way.needs)
            found.append(planned(place, node.path, op, way, fewest(op.count), 0))
        return tuple(found)

    def needs(self, tiers: Mapping[Value, str]) -> list[int]:
        """Bytes that links may need, from the least with which all chains can run."""
        ways = [[way.needs for way in self.ways(place, node, op, tiers)] for place, node, op in self.all]
        least = max(map(min, ways))
        return sorted({max(least, needs) for each in ways for needs in each})

    def ways(self, place: int, node: Node, op: Chain, tiers: Mapping[Value, str]) -> list[Way]:
        """The ways to run a link. If a vector of some links lives below, all links are planned as if theirs did."""
        below = self.below(node, op, tiers)
        key = place, tuple(sorted(below.items()))
        if key not in self.known:
            self.known[key] = self.find(self.network_of(op.body, below), op.body)
        return self.known[key]

    def below(self, node: Node, op: Chain, tiers: Mapping[Value, str]) -> dict[int, str]:
        """The tiers of a link's own vectors that live below the device in some link."""
        if self.last_tiers is not tiers:
            self.last_tiers, self.found = tiers, {}
        if node.serial not in self.found:
            found: dict[int, str] = {}
            for k in range(op.count) if tiers else ():
                found |= {i: tiers[v] for i, v in enumerate(op.own(node, k)) if v in tiers}
            self.found[node.serial] = found
        return self.found[node.serial]

    @cached_property
    def plain(self) -> list[tuple[int, int]]:
        """Bytes that plain PyTorch holds for backward of a link of each chain, and those of its maps."""
        links = [self.network_of(op.body, {}) for _, _, op in self.all]
        return [(link.plain_bytes, link.made_bytes) for link in links]

    def network_of(self, body: Body, below: Mapping[int, str]) -> Network:
        """A link as a network of its own; ``below`` are the tiers of its own vectors that live below the device."""
        tensors = {
            v: torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)
            for v in (*body.entries, *body.own)
        }
        bindings = Bindings({}, {v: Capture(t, None) for v, t in tensors.items()})
        tiers = {id(tensors[body.own[i]]): tier for i, tier in below.items()}
        return Network(Recording(body.nodes, bindings), below=tiers, space=self.network.axes_of_space)

    def forecast(self, plan: Plan, chains: Sequence[ChainPlan], tiers: Mapping[Value, str]) -> Forecast:
        """The forecast of a plan, with that of its chains."""
        forward = sum(c.count * c.forecast.seconds / (3 * c.count + c.forecast.forwards) for c in chains)
        again = sum(c.forecast.forwards * c.forecast.seconds / (3 * c.count + c.forecast.forwards) for c in chains)
        rest = plan.seconds / 3
        traffic = 0
        for (_, node, _), chain in zip(self.all, chains, strict=True):
            size = sum(v.bytes for v in node.inputs if v in tiers)
            traffic += int(size * (3 + chain.forecast.forwards / chain.count))
        return replace(
            plan.forecast,
            seconds=plan.seconds + seconds(chains),
            recompute=(again + plan.recompute * rest) / max(forward + rest, 1e-12),
            plain_bytes=plan.plain_bytes + sum(c.count * saved for c, (saved, _) in zip(chains, self.plain)),
            made_bytes=plan.forecast.made_bytes + sum(c.count * made for c, (_, made) in zip(chains, self.plain)),
            traffic_bytes=plan.forecast.traffic_bytes + traffic,
        )


def seconds(plans: Sequence[ChainPlan]) -> float:
    return sum(plan.forecast.seconds for plan in plans)


def fewest(count: int) -> int:
    """The fewest slots with which no link runs forward more than ``MOST_RUNS`` times."""
    free = 0
    while min_forward_runs(count, free) > MOST_RUNS:
        free += 1
    return free


def fastest(place: int, path: str, op: Chain, ways: Sequence[Way], room: int) -> ChainPlan | None:
    """The fastest plan of a chain whose slots and kept links fit the room."""
    best: ChainPlan | None = None
    for way in ways:
        for kept in numbers_kept(op.count, way, room):
            unkept = op.count - kept
            left = (room - kept * (way.kept or 0)) // max(1, op.body.entry_bytes)
            slots = min(left, max(0, unkept - 1))
            if slots < fewest(unkept):
                continue
            found = planned(place, path, op, way, slots, kept)
            if best is None or found.forecast.seconds < best.forecast.seconds:
                best = found
    return best


def numbers_kept(count: int, way: Way, room: int) -> Iterator[int]:
    """Numbers of links that may be kept, from none to as many as there is room for."""
    yield 0
    if way.kept is None or not any(s.keep for s in way.segments):
        return
    most = min(count, max(0, room) // max(1, way.kept))
    yield from sorted({math.ceil(i * most / STEPS) for i in range(1, STEPS + 1)} - {0})


def planned(place: int, path: str, op: Chain, way: Way, slots: int, kept: int) -> ChainPlan:
    """The plan of a chain run in this way, with its forecast."""
    unkept = op.count - kept
    once = unkept + forwards_after_run(unkept, slots) if op.trains else 0  # and once more when it is pulled back
    total = op.count * way.seconds + once * way.forward
    forecast = ChainForecast(op.body.entry_bytes, way.needs, way.kept or 0, once, total)
    return ChainPlan(place, op.count, slots, kept, way.segments, path, forecast)


def with_peaks(plans: Sequence[ChainPlan], found: RehearsedMemory) -> tuple[ChainPlan, ...]:
    """Plans of chains, with the peak that a rehearsal found while links ran."""
    peak = max((turn.peak for (place, _), turn in found.turns.items() if in_chains(place)), default=0)
    return tuple(replace(plan, forecast=replace(plan.forecast, peak_bytes=peak)) for plan in plans)


def in_chains(place: Any) -> bool:
    """True for the turn of a chain, or of a segment in one."""
    return place == CHAIN or place >= FIRST_LINK_PLACE
