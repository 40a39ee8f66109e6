"""Ways to run one interval tile by tile in its surroundings: grids that fit the room that is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Value
from lightning_plugin.planner.costs.cost import Cost
from lightning_plugin.planner.costs.lower import NONE, Transit
from lightning_plugin.planner.search.interval import Intervals, Where
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.program import Program

#: Halos that cost less than this share of a segment's work are not worth sharing.
WORTH_SHARING = 0.03


@dataclass(slots=True)
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

    def with_transfers(self, writes: Transit, reads: Transit, ahead: bool) -> float:
        """The seconds of both passes, given what is written once and read once."""
        back = None if self.backward is None else self.backward[1].seconds
        return with_transfers(self.forward[1].seconds, back, writes, reads, ahead)

    def once(self, reads: Transit, ahead: bool) -> float:
        """The seconds of making what it stores once more."""
        return reads.with_work(self.forward[1].seconds, ahead)

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
    def seconds(self) -> float:
        """Of both passes, without transfers."""
        return self.forward[1].seconds + (self.backward[1].seconds if self.backward else 0.0)

    @property
    def work(self) -> float:
        return self.forward[1].work + (self.backward[1].work if self.backward else 0.0)


class Room(NamedTuple):
    """Bytes that are free for a segment, and what of them is taken: by what it stores in forward, by the cotangents of
    its ends in backward."""

    free: int
    stored: int
    ends: int


def with_transfers(
    forward: float, backward: float | None, writes: Transit, reads: Transit, ahead: bool, recalled: Transit = NONE
) -> float:
    """The seconds of a segment's passes with its transfers, given what is written once and read once, and what backward
    reads back.

    Backward reads the cotangents of what was written, and its input again, and adds to the cotangents of that.
    """
    passes = [(forward, writes + reads)]
    if backward is not None:
        passes.append((backward, writes + recalled + reads.times(3)))
    return sum(transit.with_work(work, ahead) for work, transit in passes)


class Ways:
    """What a policy allows of one network's intervals."""

    def __init__(self, intervals: Intervals, policy: Policy) -> None:
        self.intervals = intervals
        self.policy = policy

    def of(self, where: Where, room: Room, trains: bool) -> Iterator[Tiled]:
        """Tiles that compute their halos twice, and where that costs something, tiles that share them."""
        intervals = self.intervals
        plain = intervals.plain_work(where.begin, where.end)
        halos = self.policy.halos if self.policy.shape != "whole" else ("recompute",)
        recompute = self.recomputed(where, room, trains) if "recompute" in halos else None
        if recompute is not None:
            yield recompute
        if "share" not in halos or where.ahead or where.pieces > 1:  # the tiles of a scan are not known ahead
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
            forward = backward[0], self.intervals.cost(self.intervals.costed(where), backward[0], False)
        return Tiled("recompute", forward, backward, room.ends, room.stored)


class Placement(NamedTuple):
    """Where a segment puts what it stores (also as a set, and how many bytes): the tier, and the bytes there and on
    the device."""

    stored: tuple[Value, ...]
    maps: frozenset[Value]
    size: int
    tier: str
    device: int
    below: int


@dataclass(slots=True)
class Moves:
    """Where a segment puts what it stores, the maps that are ``brought`` from lower tiers, and what each takes once."""

    placement: Placement
    brought: Sequence[Value]
    writes: Transit
    reads: Transit

    def __bool__(self) -> bool:
        return self.placement.below > 0 or bool(self.brought)


@dataclass(frozen=True)
class Span:
    """An interval of the order, and what all ways to run it have in common.

    Attributes:
        program: What it computes in tiles.
        read: The maps that it reads.
        trains: Whether anything that it makes requires grad.
        before: The maps that are alive at its beginning.
        after: The maps that are alive at its end.
        flight: The bytes of its copies of streamed tensors, and of their gradients.
        plain: The operations of its forward.
    """

    begin: int
    end: int
    program: Program
    read: frozenset[Value]
    trains: bool
    before: frozenset[Value]
    after: frozenset[Value]
    flight: int
    plain: float


class Site(NamedTuple):
    """A tiled segment's surroundings: its interval, the room there is, the bytes of tiles that make again what it
    reads, and what its maps take to where they are put and from where they lie; of these the ``keys``, of which each
    tile of queries reads all."""

    span: Span
    where: Where
    placement: Placement
    room: Room
    again: int
    writes: Transit
    reads: Transit
    keys: Transit
