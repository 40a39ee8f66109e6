"""The contents of a map, as far as they are known: its constant parts, and its tiles that one computation has made.

[Note: background] Most of a slide is *background* of one value. A source can say so without reading; a tensor, a
padded batch say, is compared once in a step, where a plan counts on it. Of a boundary it is seen when its tiles are
written, where what they were made from was background in part: cell by cell, as the tile next to tissue is constant in
most of its cells too. A cell is known to be constant when all of it was written with one value, to the bit. Looking
takes time, so it ends with the last segment that a plan has share identical tiles. What is known serves identical tiles
([Note: identical tiles] in `execute.tile_pass`) and the search for a plan (`planner.analysis.background`); nothing else
depends on it.

[Note: stored once] Tiles that forward has made by one computation have one number: boxes that lie alike in them hold
the same, to the bit. A lower tier is sent the first of the tiles that have one number, and no other. A box that is read
is put together from the parts of it in tiles for which others stand, each from where the same lies, and the rest. That
takes the room that the box takes anyway, so that a rehearsal, which knows of no numbers, counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.private import FakeTensor, dense_bytes

#: Cells that nothing was written to, and cells of several values. Those of one have its number, from 1 on.
UNKNOWN, VARIED = -1, 0
#: No more cells than this on an axis of a boundary, or in all of it.
MOST_ON_AXIS, MOST = 128, 1 << 17
#: A tensor of which less is constant is taken for tissue: no plan gains by it.
LEAST = 0.1
#: A cell of a tensor is no shorter than this in space: pixels beside each other are equal by chance.
SHORTEST = 8


class Constants:
    """The cells of a map of some extent, of so many on an axis at most and on the first axes of no less than a length;
    ``keys`` are what their numbers stand for."""

    def __init__(
        self, extent: Sequence[int], on_axis: int = MOST_ON_AXIS, most: int = MOST, shortest: Sequence[int] = ()
    ) -> None:
        counts = [max(1, min(size // least, on_axis)) for size, least in zip_longest(extent, shortest, fillvalue=1)]
        while math.prod(counts) > most:
            longest = counts.index(max(counts))
            counts[longest] = -(-counts[longest] // 2)
        self.extent = tuple(extent)
        self.sides = tuple(-(-size // count) for size, count in zip(extent, counts, strict=True))
        counts = [-(-size // side) for size, side in zip(extent, self.sides, strict=True)]
        self.cells = np.full(counts, UNKNOWN, dtype=np.int32)
        self.keys: list[bytes] = []
        self.numbers: dict[bytes | None, int] = {None: VARIED}

    def at(self, box: Box) -> bytes | None:
        """The key of the value on a box, where all of it is known to be the same."""
        if not self.keys or box.empty:
            return None
        here = self.cells[self.over(box)]
        first = int(here.flat[0])
        return self.keys[first - 1] if first > VARIED and bool((here == first).all()) else None

    def near(self, box: Box) -> bool:
        """True if some cell of a box is known to be constant."""
        return bool(self.keys) and bool((self.cells[self.over(box)] > VARIED).any())

    def note(self, box: Box, key: bytes | None) -> None:
        """A box was written, with one value that the key stands for, or with several."""
        self.merge(self.over(box), np.asarray(self.number(key)))

    def compare(self, layout: Layout, tile: Tensor, box: Box) -> bytes | None:
        """A tile was written: look where it is constant. The key of its value, if it has but one."""
        values = bits(positions_first(layout, tile, box))
        starts = [self.starts(a, lo, hi) for a, (lo, hi) in enumerate(box.intervals())]
        changes = [changed(values, a) for a in range(box.ndim)]
        if isinstance(values, FakeTensor):
            return None
        varied = sum((per_cell(c, a, starts) for a, c in enumerate(changes)), np.zeros(1, dtype=np.int64))
        varied = np.broadcast_to(varied, [len(s) for s in starts])
        found = np.full(varied.shape, VARIED)
        constant = varied == 0
        if constant.any():
            index = np.ix_(*starts)
            rows = values[tuple(torch.from_numpy(i) for i in index)][torch.from_numpy(constant)]
            found[constant] = [self.number(key) for key in keys_of(rows.view(tile.dtype))]
        self.merge(self.over(box), found)
        first = int(found.flat[0])
        whole = first > VARIED and bool((found == first).all())
        return self.keys[first - 1] if whole else None

    def merge(self, over: tuple[slice, ...], numbers: np.ndarray) -> None:
        """Cells of which something was written."""
        here = self.cells[over]
        self.cells[over] = np.where((here == UNKNOWN) | (here == numbers), numbers, VARIED)

    def number(self, key: bytes | None) -> int:
        if key is not None and key not in self.numbers:
            self.keys.append(key)
            self.numbers[key] = len(self.keys)
        return self.numbers[key]

    def over(self, box: Box) -> tuple[slice, ...]:
        """The cells that a box touches."""
        return tuple(slice(lo // s, -(-hi // s)) for (lo, hi), s in zip(box.intervals(), self.sides, strict=True))

    def starts(self, axis: int, lo: int, hi: int) -> np.ndarray:
        """The beginnings of the cells that an interval touches, counted from its own beginning."""
        side = self.sides[axis]
        return np.maximum(np.arange(lo // side, -(-hi // side)) * side - lo, 0)

    @staticmethod
    def asked(
        extent: Sequence[int], constant: Callable[[Box], Tensor | None], on_axis: int, most: int
    ) -> Constants | None:
        """Constant parts of an image, by asking of boxes, half after half; None where nothing is. An image of which the
        halves of halves know nothing, as long as these are a sixteenth of it on each axis, is not asked again."""
        found = Constants(extent, on_axis, most)
        boxes, depth, patience = [Box.whole(found.cells.shape)], 0, 4 * len(found.cells.shape)
        while boxes and (depth <= patience or found.keys):
            parts: list[Box] = []
            for cells in boxes:
                value = constant(found.positions(cells))
                if value is not None or cells.positions == 1:
                    found.merge(tuple(map(slice, cells.lo, cells.hi)), np.asarray(found.number(value_key(value))))
                else:
                    parts += halves(cells)
            boxes, depth = parts, depth + 1
        return found if found.keys else None

    @staticmethod
    def compared(layout: Layout, tensor: Tensor, shortest: Sequence[int] = (), least: float = 0.0) -> Constants | None:
        """Constant parts of a tensor, found by looking: first at two corners of each cell. None where no more of it is
        than the least that counts."""
        if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
            return None
        found, whole = Constants(layout.extent, shortest=shortest), Box.whole(layout.extent)
        values = bits(positions_first(layout, tensor.detach(), whole))
        last = values[tuple(slice(side - 1, None, side) for side in found.sides)]  # views: there may be no memory
        first = values[tuple(slice(0, n * side, side) for n, side in zip(last.shape, found.sides, strict=False))]
        likely = (first == last).all(-1).cpu().numpy()
        if likely.mean() <= least:
            return None
        likely = np.pad(likely, [(0, n - m) for n, m in zip(found.cells.shape, likely.shape, strict=True)], "edge")
        cells = Box.whole(found.cells.shape)
        for row in np.flatnonzero(likely.any(tuple(range(1, likely.ndim)))).tolist():
            box = found.positions(cells.replace(0, row, row + 1))
            found.compare(layout, layout.narrow(tensor.detach(), whole, box), box)
        return found if (found.cells > VARIED).mean() > least else None

    @property
    def blank(self) -> bool:
        """True if all of it is one value."""
        return bool((self.cells == self.cells.flat[0]).all()) and bool(self.keys)

    def positions(self, cells: Box) -> Box:
        """The positions of a box of cells."""
        return Box(
            tuple(lo * side for lo, side in zip(cells.lo, self.sides, strict=True)),
            tuple(min(hi * side, size) for hi, side, size in zip(cells.hi, self.sides, self.extent, strict=True)),
        )


def halves(box: Box) -> list[Box]:
    """A box cut on its longest axis."""
    axis = box.extent.index(max(box.extent))
    lo, hi = box.lo[axis], box.hi[axis]
    return [box.replace(axis, a, b) for a, b in pairwise((lo, (lo + hi) // 2, hi))]


def positions_first(layout: Layout, tile: Tensor, box: Box) -> Tensor:
    """A tile as (positions on each axis..., all that lies at a position)."""
    factors = [f for dim in layout.dims for f in dim]
    place = {f.index: i for i, f in enumerate(factors) if isinstance(f, Axis)}
    axes = [place[a] for a in range(box.ndim) if a in place]
    rest = [i for i in range(len(factors)) if i not in axes]
    values = layout.spread(tile, box).permute(*axes, *rest).unsqueeze(-1).flatten(len(axes))
    for a in range(box.ndim):
        if a not in place:  # an axis of one position may lie nowhere
            values = values.unsqueeze(a)
    return values


def bits(values: Tensor) -> Tensor:
    """Values as numbers that are equal if and only if they are the same to the bit, as zeros of two signs are not."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(-2)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(whole[values.dtype.itemsize])


def changed(values: Tensor, axis: int) -> Tensor:
    """For each position, true if it differs from the one before it on an axis."""
    count = values.shape[axis]
    return (values.narrow(axis, 1, count - 1) != values.narrow(axis, 0, count - 1)).any(-1)


def per_cell(changes: Tensor, axis: int, starts: Sequence[np.ndarray]) -> np.ndarray:
    """The number of positions of each cell that differ from the one before them on an axis."""
    found = changes.cpu().numpy().astype(np.int64)
    first = np.zeros_like(found, shape=[*found.shape[:axis], 1, *found.shape[axis + 1 :]])
    found = np.concatenate([first, found], axis)
    np.moveaxis(found, axis, 0)[starts[axis]] = 0  # what differs from another cell's
    for a, at in enumerate(starts):
        found = np.add.reduceat(found, at, axis=a)
    return found


def value_key(value: Tensor | None) -> bytes | None:
    return None if value is None else key_of(value)


def key_of(values: Tensor) -> bytes:
    """Equal for equal values of one type."""
    return keys_of(values.reshape(1, -1))[0]


def keys_of(rows: Tensor) -> list[bytes]:
    """The key of each row."""
    numbers = dense_bytes(rows)
    kind = str(rows.dtype).encode()
    return [kind + row for row in numbers.view(f"V{numbers.shape[1]}").ravel().tolist()]


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
