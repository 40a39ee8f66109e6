"""Ways to run one interval tile by tile beside the rest of a partial plan: on grids that fit the room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Value
from lightning_plugin.planner.costs.cost import Cost
from lightning_plugin.planner.costs.lower import NONE, TransferTime
from lightning_plugin.planner.costs.peak import TiledInterval
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.program import Program

#: Halos that cost less than this share of a segment's work are not shared.
CHEAP_HALO = 0.03


@dataclass(slots=True)
class TiledWay:
    """A way to run an interval tile by tile.

    Attributes:
        halo: "recompute" or "share".
        forward: Grid and cost of forward.
        backward: Grid and cost of backward; None without grad.
        ends: Bytes of the cotangents at both ends.
        stored: Bytes of its outputs on the device.
    """

    halo: str
    forward: tuple[Grid, Cost]
    backward: tuple[Grid, Cost] | None
    ends: int
    stored: int

    @property
    def carried(self) -> int:
        """Bytes that a scan holds from forward until its backward."""
        return self.forward[1].carried if self.backward is not None else 0

    def with_transfers(self, writes: TransferTime, reads: TransferTime, ahead: bool) -> float:
        """Seconds of both passes, with transfers."""
        back = None if self.backward is None else self.backward[1].seconds
        return with_transfers(self.forward[1].seconds, back, writes, reads, ahead)

    def recompute_seconds(self, reads: TransferTime, ahead: bool) -> float:
        """Seconds of recomputing its outputs once."""
        return reads.with_work(self.forward[1].seconds, ahead)

    @property
    def forward_bytes(self) -> int:
        """Bytes of forward beyond those held before: its outputs and its tiles."""
        return self.stored + self.carried + self.forward[1].bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes of backward: its tiles beside the cotangents of its ends. Its outputs are gone by then, with the last
        segment that reads them."""
        return self.carried + self.ends + self.backward[1].bytes if self.backward else 0

    @property
    def peak(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of both passes, without transfers."""
        return self.forward[1].seconds + (self.backward[1].seconds if self.backward else 0.0)

    @property
    def work(self) -> float:
        return self.forward[1].work + (self.backward[1].work if self.backward else 0.0)


class Room(NamedTuple):
    """Bytes for one more segment.

    Attributes:
        free: Bytes that are free.
        stored: Bytes of them that its outputs take in forward.
        ends: Bytes of them that the cotangents of its ends take in backward.
    """

    free: int
    stored: int
    ends: int


def with_transfers(
    forward: float,
    backward: float | None,
    writes: TransferTime,
    reads: TransferTime,
    ahead: bool,
    recalled: TransferTime = NONE,
) -> float:
    """Seconds of a segment's passes with its transfers. ``writes`` are made once, ``reads`` once in forward,
    ``recalled`` once in backward.

    Backward reads the cotangents of the outputs and the inputs again, and adds to the cotangents of the inputs.
    """
    passes = [(forward, writes + reads)]
    if backward is not None:
        passes.append((backward, writes + recalled + reads.times(3)))
    return sum(transit.with_work(work, ahead) for work, transit in passes)


class WaysToTile:
    """Ways to run the intervals of one network under a policy."""

    def __init__(self, intervals: Intervals, policy: Policy) -> None:
        self.intervals = intervals
        self.policy = policy

    def of(self, interval: TiledInterval, room: Room, trains: bool) -> Iterator[TiledWay]:
        """Tiles that recompute their halos and, if that costs something, tiles that share them."""
        intervals = self.intervals
        plain = intervals.plain_work(interval.begin, interval.end)
        halos = self.policy.halos if self.policy.shape != "whole" else ("recompute",)
        recompute = self.recomputed(interval, room, trains) if "recompute" in halos else None
        if recompute is not None:
            yield recompute
        if "share" not in halos or interval.ahead or interval.pieces > 1:  # the tiles of a scan are not known ahead
            return
        if recompute is not None and recompute.work < (2 if trains else 1) * plain * (1 + CHEAP_HALO):
            return
        found = intervals.coarsest_scan(interval, room.free - max(room.stored, room.ends), trains)
        if found is not None:
            grid, forward, backward = found
            yield TiledWay("share", (grid, forward), (grid, backward) if trains else None, room.ends, room.stored)
        elif "recompute" not in halos:
            whole = self.recomputed(interval, room, trains)  # what cannot share has to do without
            if whole is not None:
                yield whole

    def recomputed(self, interval: TiledInterval, room: Room, trains: bool) -> TiledWay | None:
        """Tiles that recompute their halos; None if no grid fits."""
        forward = self.intervals.fastest_grid(interval, room.free - room.stored, False)
        if forward is None:
            return None
        if not trains:
            return TiledWay("recompute", forward, None, 0, room.stored)
        backward = self.intervals.fastest_grid(interval, room.free - room.ends, True)
        if backward is None:
            return None
        if self.policy.same and forward[0] != backward[0]:
            forward = backward[0], self.intervals.cost(self.intervals.first_equal(interval), backward[0], False)
        return TiledWay("recompute", forward, backward, room.ends, room.stored)


class Placement(NamedTuple):
    """The tier of a segment's outputs.

    Attributes:
        stored: The maps.
        maps: The same as a set.
        size: Their bytes.
        tier: The tier.
        device: Their bytes on the device.
        below: Their bytes on a lower tier.
    """

    stored: tuple[Value, ...]
    maps: frozenset[Value]
    size: int
    tier: str
    device: int
    below: int


@dataclass(slots=True)
class Moves:
    """Transfers of a segment.

    Attributes:
        placement: The tier of its outputs.
        brought: The inputs that come from lower tiers.
        writes: The time of moving its outputs once.
        reads: The time of moving its inputs once.
    """

    placement: Placement
    brought: Sequence[Value]
    writes: TransferTime
    reads: TransferTime

    def __bool__(self) -> bool:
        return self.placement.below > 0 or bool(self.brought)


@dataclass(frozen=True)
class Span:
    """An interval of the order, with facts that all ways to run it share.

    Attributes:
        program: Its tiled program.
        read: The maps that it reads.
        trains: Some result of it requires grad.
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
    """A tiled segment beside the rest of a partial plan.

    Attributes:
        span: Its interval.
        interval: The interval with the tiers of its maps.
        placement: The tier of its outputs.
        room: The bytes for it.
        recompute_bytes: The bytes of tiles that recompute its inputs.
        writes: The time of moving its outputs once.
        reads: The time of moving its inputs once.
        keys: The part of ``reads`` that every tile of queries repeats.
    """

    span: Span
    interval: TiledInterval
    placement: Placement
    room: Room
    recompute_bytes: int
    writes: TransferTime
    reads: TransferTime
    keys: TransferTime
