"""What is dropped and has to come back: which maps, when they are there, and what it takes to make them again.

This is what a plan says of [Note: dropped] in `execute.recompute`, for those who plan, predict or draw.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_plugin.graph import Value
from lightning_plugin.plan import DEEPEST


@dataclass(frozen=True)
class Dropped:
    """What a segment stores and drops, and how deep: the maps and their bytes, what it takes to make them once more
    (the bytes of the tiles, work and seconds), and the maps that are read to do so."""

    maps: frozenset[Value]
    size: int
    tiles: int
    reads: frozenset[Value]
    depth: int = 1
    work: float = 0.0
    seconds: float = 0.0


def still_needed(dropped: Sequence[Dropped], maps: Collection[Value]) -> tuple[Dropped, ...]:
    """Of what was dropped in this order, what some maps are among, and what it takes to make that again."""
    found: list[Dropped] = []
    for d in reversed(dropped):
        if not d.maps.isdisjoint(maps) or any(not f.reads.isdisjoint(d.maps) for f in found):
            found.append(d)
    return tuple(reversed(found))


def staying(dropped: Sequence[Dropped], maps: Collection[Value] = ()) -> tuple[Dropped, ...]:
    """Of what was dropped in this order, what is there when some maps have come back: they, and what has nothing after
    it that is dropped less deeply."""
    found: list[Dropped] = []
    least = DEEPEST
    for d in reversed(dropped):
        if d.depth <= least or not d.maps.isdisjoint(maps):
            found.append(d)
        least = min(least, d.depth)
    return tuple(reversed(found))


def passed(dropped: Sequence[Dropped], depth: int) -> tuple[Dropped, ...]:
    """Of what was dropped in this order, what one more drop to a depth will have made once more than before: it is let
    go on the way there, and made again when backward has come back to it."""
    found: list[Dropped] = []
    for d in reversed(dropped):
        if d.depth <= depth:
            break
        found.append(d)
    return tuple(reversed(found))


def recomputing(dropped: Sequence[Dropped], maps: Collection[Value]) -> int:
    """The most bytes that making all of this again, in order, takes beyond what stays of it."""
    there = most = 0
    stay = staying(dropped, maps)
    for d in dropped:
        read = sum(f.size for f in dropped if f not in stay and not f.maps.isdisjoint(d.reads))
        most = max(most, there + read + d.size + d.tiles)
        there += d.size if d in stay else 0
    return max(0, most - there)
