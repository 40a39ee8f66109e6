"""N-dimensional half-open boxes and the grids that cut an extent into them.

A *box* is a product of half-open integer intervals, one for each axis. All geometry is expressed in boxes: the part of
a map that a tile owns, the part of an input that it needs, the extent of a map. Boxes are small immutable values
without tensors, so that planning for a gigapixel image takes as long as for a thumbnail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Positions ``lo <= p < hi``, axis by axis."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise ValueError(f"a box needs as many lower as upper ends, got lo={self.lo} and hi={self.hi}")

    @staticmethod
    def whole(extent: Sequence[int]) -> Box:
        """Return the box of a whole map."""
        return Box((0,) * len(extent), tuple(extent))

    @staticmethod
    def of(intervals: Iterable[tuple[int, int]]) -> Box:
        """Make a box from one ``(lo, hi)`` pair for each axis."""
        pairs = tuple(intervals)
        return Box(*zip(*pairs, strict=True)) if pairs else Box((), ())

    @property
    def extent(self) -> tuple[int, ...]:
        return tuple([hi - lo if hi > lo else 0 for lo, hi in zip(self.lo, self.hi)])

    @property
    def positions(self) -> int:
        """Number of positions in the box."""
        count = 1  # a search for a plan asks a million times: plain loops are faster than generators, here and below
        for lo, hi in zip(self.lo, self.hi):
            if hi <= lo:
                return 0
            count *= hi - lo
        return count

    @property
    def empty(self) -> bool:
        for lo, hi in zip(self.lo, self.hi):  # noqa: SIM110
            if hi <= lo:
                return True
        return False

    @property
    def ndim(self) -> int:
        return len(self.lo)

    def intervals(self) -> Iterator[tuple[int, int]]:
        return zip(self.lo, self.hi, strict=True)

    def replace(self, axis: int, lo: int, hi: int) -> Box:
        """Return the box with another interval on one axis."""
        return Box((*self.lo[:axis], lo, *self.lo[axis + 1 :]), (*self.hi[:axis], hi, *self.hi[axis + 1 :]))

    def shift(self, offset: Sequence[int]) -> Box:
        return Box.of((lo + o, hi + o) for (lo, hi), o in zip(self.intervals(), offset, strict=True))

    def broadcast(self, extent: Sequence[int]) -> Box:
        """Return the box of a map of this extent that is broadcast to the box: on axes of size one, all of it."""
        if len(extent) == len(self.lo):
            for size, lo, hi in zip(extent, self.lo, self.hi):
                if size == 1 and (lo or hi != 1):
                    break
            else:
                return self
        return Box.of((0, 1) if size == 1 else i for i, size in zip(self.intervals(), extent, strict=True))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that contains both; an empty box adds nothing."""
        if self.empty:
            return other
        if other.empty:
            return self
        return Box(
            tuple(map(min, self.lo, other.lo)),
            tuple(map(max, self.hi, other.hi)),
        )

    def intersect(self, other: Box) -> Box:
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def contains(self, other: Box) -> bool:
        if other.empty:
            return True
        for lo, hi, first, last in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            if first < lo or hi < last:
                return False
        return True

    def __str__(self) -> str:
        return "[" + " x ".join(f"{lo}:{hi}" for lo, hi in self.intervals()) + "]"


@dataclass(frozen=True, slots=True)
class Window:
    """Window along one axis: output ``o`` reads inputs ``o*stride - before + dilation*[0, kernel)``."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the interval of inputs that the outputs ``[lo, hi)`` read; it may extend beyond the map."""
        start = lo * self.stride - self.before
        return start, start + (hi - lo - 1) * self.stride + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True, slots=True)
class Clip:
    """Interval clipped to a map: ``[lo, hi)`` is read, ``before`` and ``after`` are the padding."""

    lo: int
    hi: int
    before: int
    after: int

    @staticmethod
    def at(lo: int, hi: int, size: int) -> Clip:
        """Clip ``[lo, hi)`` to ``[0, size)``."""
        first, last = clip_interval(lo, hi, size)
        return Clip(first, last, first - lo, hi - last)


def clip_interval(lo: int, hi: int, size: int) -> tuple[int, int]:
    """Clip ``[lo, hi)`` to ``[0, size)``; an interval outside is replaced by the position next to it.

    So no tile is empty, and operators that refuse empty tensors need no special case. The caller removes the position
    by negative padding.
    """
    first, last = max(lo, 0), min(hi, size)
    if last > first:
        return first, last
    first = min(first, size - 1)
    return first, first + 1


def cuts(size: int, pieces: int, step: int = 0) -> tuple[int, ...]:
    """Return the bounds of ``pieces`` intervals of one length in ``[0, size)``.

    The last intervals may be shorter or empty. The length is ``step``; by default the smallest that covers the size.
    """
    step = step or -(-size // max(1, pieces))
    return (*(min(size, step * i) for i in range(pieces)), size)


def nonempty_pieces(size: int, pieces: int) -> int:
    """Count the intervals of `cuts` that are not empty."""
    return -(-size // -(-size // pieces)) if size else 1


def scaled_cuts(reference: Sequence[int], size: int) -> tuple[int, ...]:
    """Scale the cuts of a reference map to another map's size.

    If the two sizes differ by a stride (possibly after rounding), the scale is that integer, so that tiles of both maps
    start at the same image positions; else it is their ratio.
    """
    full = reference[-1]
    if full <= 0 or size == full:
        return (*(min(size, c) for c in reference[:-1]), size)
    stride = -(-size // full)
    exact = abs(size - full * stride) < stride
    inner = (c * stride if exact else (c * size) // full for c in reference[:-1])
    return (*(min(size, c) for c in inner), size)


def reference_of(extents: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the extent whose cuts the others follow: of those with the most axes, the smallest."""
    return min(extents, key=lambda extent: (-len(extent), Box.whole(extent).positions))


def box_at(axes: Sequence[tuple[int, ...]], index: Sequence[int]) -> Box:
    """Return the box of a map at a grid index.

    Args:
        axes: The cuts of the map on each axis.
        index: The grid index. On further axes than the map's, the map belongs to the first tiles, and others get an
            empty box.
    """
    here = (*index, *(0 for _ in axes[len(index) :]))
    if any(index[len(axes) :]):
        return Box.of((axis[0], axis[0]) for axis in axes)
    return Box.of((axis[i], axis[i + 1]) for axis, i in zip(axes, here, strict=False))


def index_on_axis(index: int, axis: int, axes: int) -> tuple[int, ...]:
    """Return the grid index with ``index`` on one axis and 0 on the others."""
    return tuple(index if a == axis else 0 for a in range(axes))


def representative_indices(count: int) -> list[int]:
    """Return indices of tiles on one axis that stand for all: two next to each border, and two in the middle, whose
    sizes may differ by one."""
    middle = count // 2
    return sorted({i for i in (0, 1, middle - 1, middle, count - 2, count - 1) if 0 <= i < count})


@dataclass(frozen=True, slots=True)
class Grid:
    """Tile grid.

    Attributes:
        counts: Number of tiles along each axis.
        sides: Length of tiles along each axis of the smallest map; by default the smallest that covers it.
    """

    counts: tuple[int, ...]
    sides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.counts or any(c < 1 for c in self.counts):
            raise ValueError(f"a tile grid needs at least one tile on each axis, got {self.counts}")
        if self.sides and (len(self.sides) != len(self.counts) or any(s < 1 for s in self.sides)):
            raise ValueError(f"a tile grid of {self} tiles has no tiles of sides {self.sides}")

    @property
    def tiles(self) -> int:
        count = 1
        for c in self.counts:
            count *= c
        return count

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the tile indices in row-major order."""
        return itertools.product(*(range(c) for c in self.counts))

    def partition(
        self, extents: Sequence[tuple[int, ...]], reference: tuple[int, ...] = ()
    ) -> Iterator[tuple[Box, ...]]:
        """Yield for each tile the box that it owns of each of several maps; the boxes of one map partition it.

        The reference is by default the smallest map. It is cut evenly, the others in proportion (`scaled_cuts`). Each
        position has one owner, also if computed tiles overlap, or if a later stride skips it. A map with more axes than
        the grid is not cut along these; a map with fewer axes belongs to some tiles only.
        """
        ends = self.ends(extents, reference)
        for index in self.indices():
            boxes = self.owned(ends, index)
            if not all(b.empty for b in boxes):
                yield boxes

    def ends(self, extents: Sequence[tuple[int, ...]], reference: tuple[int, ...] = ()) -> list[list[tuple[int, ...]]]:
        """Return the cuts of the grid on each axis of each map."""
        reference = reference or reference_of(extents)
        sides = self.sides or (0,) * len(self.counts)
        first = [cuts(*axis) for axis in zip(reference, self.counts, sides, strict=False)]
        return [
            [scaled_cuts(first[a], size) if a < len(first) else (0, size) for a, size in enumerate(extent)]
            for extent in extents
        ]

    @staticmethod
    def owned(ends: list[list[tuple[int, ...]]], index: Sequence[int]) -> tuple[Box, ...]:
        """Return the box that the tile at a grid index owns of each map."""
        return tuple(box_at(axes, index) for axes in ends)

    def __str__(self) -> str:
        return "x".join(map(str, self.counts))
