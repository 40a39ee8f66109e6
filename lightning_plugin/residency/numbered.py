"""The tiles that a boundary is made of, with numbers that are equal for those of which one stands for all.

Tiles that forward has made by one computation have one number: boxes that lie alike in them hold the same, to the bit.

[Note: stored once] A lower tier is sent the first of the tiles that have one number, and no other. A box that is read
is put together from the parts of it in tiles for which others stand, each from where the same lies, and the rest. That
takes the room that the box takes anyway, so that a rehearsal, which knows of no numbers, counts it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_plugin.boxes import Box


@dataclass(frozen=True, eq=False)
class Numbered:
    """The numbers of the tiles that a map is cut into, and where these end on each axis; ``first`` is the place of the
    tile that stands for each. See [Note: stored once]."""

    ends: tuple[np.ndarray, ...]
    numbers: np.ndarray
    first: np.ndarray

    @staticmethod
    def empty(ends: Sequence[Sequence[int]]) -> Numbered:
        """Tiles without numbers, of which each stands for itself."""
        numbers = np.zeros([len(e) - 1 for e in ends], dtype=np.int64)
        return Numbered(tuple(map(np.asarray, ends)), numbers, np.arange(numbers.size).reshape(numbers.shape))

    def number(self, boxes: Sequence[Box], number: int) -> None:
        """Give the tiles of some boxes a number. The first stands for all of them."""
        places = [tuple(s.start for s in self.over(box)) for box in boxes]
        for place in places:
            self.numbers[place] = number
            self.first[place] = np.ravel_multi_index(places[0], self.first.shape)

    def over(self, box: Box) -> tuple[slice, ...]:
        """The places of the tiles that a box touches."""
        return tuple(
            slice(int(np.searchsorted(e, lo, "right")) - 1, int(np.searchsorted(e, hi, "left")))
            for e, (lo, hi) in zip(self.ends, box.intervals(), strict=True)
        )

    def signature(self, box: Box) -> Hashable:
        """Equal for boxes that lie alike in tiles of the same numbers."""
        over = self.over(box)
        axes = zip(self.ends, over, box.lo, strict=True)
        edges = tuple(tuple((e[s.start : s.stop + 1] - lo).tolist()) for e, s, lo in axes)
        return edges, self.numbers[over].tobytes()

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """The parts of a box that lie in tiles for which others stand, each with where the same is; and the rest."""
        over = self.over(box)
        shape, begin = self.first.shape, [s.start for s in over]
        own = np.ravel_multi_index(np.ix_(*(np.arange(s.start, s.stop) for s in over)), shape)
        if (self.first[over] == own).all():
            yield box, box
            return
        for index, first in np.ndenumerate(self.first[over]):
            place = tuple(b + i for b, i in zip(begin, index, strict=True))
            lo, there = self.lo(place), self.lo(np.unravel_index(first, shape))
            tile = Box(lo, self.lo([i + 1 for i in place])).intersect(box)
            yield tile, tile.shift([b - a for a, b in zip(lo, there, strict=True)])

    @property
    def spared(self) -> int:
        """The positions of all tiles for which others stand."""
        count = self.first != np.arange(self.first.size).reshape(self.first.shape)
        for ends in reversed(self.ends):
            count = count @ np.diff(ends)
        return int(count)

    def lo(self, place: Sequence[int]) -> tuple[int, ...]:
        """The beginning of the tile at a place."""
        return tuple(int(e[i]) for e, i in zip(self.ends, place, strict=True))


def parts_of(made: Numbered | None, box: Box) -> list[tuple[Box, Box]]:
    """The parts of a box, each with where it lies."""
    return [(box, box)] if made is None else list(made.parts(box))
