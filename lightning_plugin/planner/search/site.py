"""Where a tiled segment stands in a partial plan: what lies there, what room there is, and where its maps go."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_plugin.graph import Value
from lightning_plugin.planner.costs.lower_maps import Transit
from lightning_plugin.planner.search.interval import Where
from lightning_plugin.planner.search.ways import Room


@dataclass(frozen=True)
class Placement:
    """Where a segment puts what it stores (also by identity, and how many bytes): the tier, and the bytes there and on
    the device."""

    stored: tuple[Value, ...]
    maps: frozenset[int]
    size: int
    tier: str
    device: int
    below: int


@dataclass(frozen=True)
class Site:
    """A tiled segment's surroundings: the maps it reads, the room there is, the bytes of tiles that make again what it
    reads, and what its maps take to where they are put and from where they lie; of these the ``keys``, of which each
    tile of queries reads all."""

    where: Where
    placement: Placement
    read: frozenset[int]
    room: Room
    trains: bool
    again: int
    writes: Transit
    reads: Transit
    keys: Transit
