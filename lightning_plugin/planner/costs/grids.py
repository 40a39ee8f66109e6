"""The grids that are tried for an interval, from coarse to fine."""

from __future__ import annotations

from collections.abc import Callable

from lightning_plugin.boxes import Grid, pieces_of

#: Tiles on the longest axis that are tried; more come in steps of a third, as a finer choice changes little.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Tiles of fewer positions along each side cost more than background can save.
FINEST = 4
#: Of a scan every tile is planned and rehearsed, so that there are not more than these.
SCANS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


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
