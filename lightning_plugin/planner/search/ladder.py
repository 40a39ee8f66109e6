"""The best way to run an interval in the room there is, found once for all rooms in which it is the same.

What is the best in some room stays the best in every smaller one that still has room for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Ladder(Generic[Found]):
    """Rungs from small rooms to large ones: the bytes that the best way needs, the largest room that it was found
    for, and the way."""

    def __init__(self) -> None:
        self.needs: list[float] = []
        self.rooms: list[int] = []
        self.found: list[Found] = []

    def best(self, room: int, find: Callable[[int], tuple[float, Found]]) -> Found:
        """The best way in so much room; ``find`` looks for it, and says what it needs."""
        place = bisect_left(self.rooms, room)
        if place < len(self.rooms) and self.needs[place] <= room:
            return self.found[place]
        need, found = find(room)
        while place and self.rooms[place - 1] >= need:  # what was found for less room needs more, or is no better
            place -= 1
            if self.needs[place] < need:
                self.rooms[place], place = int(need) - 1, place + 1
                break
            del self.needs[place], self.rooms[place], self.found[place]
        self.needs.insert(place, need)
        self.rooms.insert(place, room)
        self.found.insert(place, found)
        return found
