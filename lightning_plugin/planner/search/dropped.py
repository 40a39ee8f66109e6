"""Dropped maps: which have to be recomputed, when they are there, and at what cost.

This is [Note: dropped] in `execute.function` as far as plans, predictions and pictures need it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_plugin.graph import Value
from lightning_plugin.plan import DEEPEST


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


def staying(dropped: Sequence[Dropped], maps: Collection[Value] = ()) -> tuple[Dropped, ...]:
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


def recomputing(dropped: Sequence[Dropped], maps: Collection[Value]) -> int:
    """The most bytes that recomputing all of these, in order, takes beyond those that stay."""
    there = most = 0
    stay = staying(dropped, maps)
    for d in dropped:
        read = sum(f.size for f in dropped if f not in stay and not f.maps.isdisjoint(d.reads))
        most = max(most, there + read + d.size + d.tiles)
        there += d.size if d in stay else 0
    return max(0, most - there)
