"""The grids that are tried for an interval, from coarse to fine, and the order in which they are looked at.

[Note: floor] What a grid costs is known by looking at its tiles, which is most of a search's work. Each grid that was
looked at puts a floor under all finer ones: they compute no less, take the calls of more tiles, and move bytes no
faster than within a cache. These are looked at only when all that is below their floor has been asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lightning_plugin.boxes import Grid, pieces_of

#: Tiles on the longest axis that are tried; more come in steps of a third, as a finer choice changes little.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Tiles of fewer positions along each side cost more than background can save.
FINEST = 4
#: Of a scan every tile is planned and rehearsed, so that there are not more than these.
SCANS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
#: What a floor is lower by: sums that are added up in another order differ in their last digits.
ROUNDING = 1e-9


class Floor(NamedTuple):
    """Seconds below which a grid is not: those of what it computes, and of each tile."""

    computed: float
    tile: float

    def under(self, grid: Grid) -> float:
        return (self.computed + grid.tiles * self.tile) * (1 - ROUNDING)


class Price(NamedTuple):
    """What an interval says of its grids: the ``seconds`` of one, the ``least`` that it takes, known without looking at
    any tiles, and the ``floor`` that it puts under finer ones, where it does."""

    seconds: Callable[[Grid], float]
    least: Callable[[Grid], float]
    floor: Callable[[Grid], Floor] | None


class Choice:
    """The grids of an interval from coarse to fine, and in the order of the seconds that they take."""

    def __init__(self, grids: list[Grid]) -> None:
        self.grids = grids
        self.seconds: dict[Grid, float] = {}
        #: The floors of grids that were looked at.
        self.floors: dict[Grid, Floor] = {}
        #: Of each place the grids that have been asked for, and the others, with seconds that they take at least.
        self.known: dict[int, tuple[list[Grid], list[tuple[float, bool, int]]]] = {}

    def from_(self, place: int, price: Price) -> Iterator[Grid]:
        """The grids from a place on, the cheapest first; the coarser of two that take equally long."""
        if place not in self.known:
            waiting = [(price.least(grid), False, i) for i, grid in enumerate(self.grids) if i >= place]
            heapify(waiting)
            self.known[place] = [], waiting
        found, waiting = self.known[place]
        for i in itertools.count():
            if i == len(found):
                if not waiting:
                    return
                found.append(self.cheapest(waiting, price))
            yield found[i]

    def cheapest(self, waiting: list[tuple[float, bool, int]], price: Price) -> Grid:
        """The cheapest of the grids that wait, which it leaves; see [Note: floor]."""
        while True:
            bound, known, i = heappop(waiting)
            grid = self.grids[i]
            if known:
                return grid
            if (floor := self.under(grid)) > bound:
                heappush(waiting, (floor, False, i))
            else:
                heappush(waiting, (self.looked_at(grid, price), True, i))

    def looked_at(self, grid: Grid, price: Price) -> float:
        if price.floor is not None and grid not in self.floors:
            self.floors[grid] = price.floor(grid)
        if grid not in self.seconds:
            self.seconds[grid] = price.seconds(grid)
        return self.seconds[grid]

    def under(self, grid: Grid) -> float:
        """The highest floor under a grid."""
        return max((floor.under(grid) for coarse, floor in self.floors.items() if is_finer(grid, coarse)), default=0.0)


def is_finer(grid: Grid, coarse: Grid) -> bool:
    """Whether a grid cuts every axis at least as often as another."""
    return all(mine >= other for mine, other in zip(grid.counts, coarse.counts, strict=True))


def nested(inner: tuple[int, ...], images: tuple[int, ...], among: list[tuple[int, ...]]) -> list[Grid]:
    """Grids whose tiles have sides of powers of two, so that tiles that see background lie alike in the tiles of the
    segment before: see [Note: identical tiles] in `execute.alike`."""
    found = [Grid((*(1 for _ in inner), *counts)) for counts in among]
    side = 1 << max(0, max(inner, default=1) - 1).bit_length()
    sides = tuple(-(-size // count) for size, count in zip(images, among[-1], strict=True))
    while side > FINEST:
        side //= 2
        counts = tuple(-(-size // side) for size in inner)
        found.append(Grid((*counts, *among[-1]), (*(side for _ in inner), *sides)))
    return found


def image_counts(images: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Into how many pieces each axis of images may be cut, from coarse to fine: the first axis until each of its images
    is alone, then the next."""
    found = [tuple(1 for _ in images)]
    for axis, size in enumerate(images):
        counts = sorted({pieces_of(size, c) for c in COUNTS if 1 < c <= size})
        while (counts or [1])[-1] < size:
            counts.append(min(size, 2 * (counts or [1])[-1]))
        found += [(*images[:axis], c, *(1 for _ in images[axis + 1 :])) for c in counts]
    return found


def row_grid(like: tuple[int, ...], count: int) -> Grid:
    """A grid that cuts the first axis only."""
    return Grid((pieces_of(like[0], count), *(1 for _ in like[1:])))


def first_that(grids: list[Grid], fits: Callable[[Grid], bool]) -> int:
    """The place of the coarsest grid that fits, by halving: finer tiles are smaller."""
    low, high = 0, len(grids)
    while low < high:
        middle = (low + high) // 2
        if fits(grids[middle]):
            high = middle
        else:
            low = middle + 1
    return low
