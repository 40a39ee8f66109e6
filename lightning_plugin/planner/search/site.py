"""Where a tiled segment stands in a partial plan: what lies there, what room there is, and where its maps go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_plugin.graph import Value
from lightning_plugin.planner.costs.lower_maps import Transit
from lightning_plugin.planner.search.interval import Where
from lightning_plugin.planner.search.ways import Room
from lightning_plugin.program.program import Program


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
