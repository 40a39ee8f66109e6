"""Known contents of maps: constant parts, and identical tiles.

[Note: background] Most of a slide is *background* of one value. A source can report it without reading. A tensor, such
as a padded batch, is compared once in a step if a plan relies on it. A boundary is compared as its tiles are written,
if their inputs were partly background: cell by cell, since a tile next to tissue is constant in most of its cells too.
A cell is constant if all of it was written with one value, to the bit. Comparing takes time, so it ends with the last
segment that shares identical tiles. Known contents serve identical tiles ([Note: identical tiles] in
`execute.tile_pass`) and the search for a plan (`planner.analysis.background`), and nothing else.

[Note: stored once] Tiles of a boundary that forward has made by one computation get one number: boxes at equal
positions in them have equal contents, to the bit. Only the first tile of a number, its *representative*, is written to
a lower tier. A box is read as several parts, each from the representative of its tile. The parts take no more memory
than the box, so that a rehearsal, in which tiles have no numbers, counts enough.
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
from lightning_plugin.private import FakeTensor, dense_bytes, values_in_memory

#: Numbers of cells that were not written and of cells with several values; constant cells have numbers from 1 on.
UNKNOWN, VARIED = -1, 0
#: Most cells on an axis of a boundary, and in all of it.
MAX_CELLS_ON_AXIS, MAX_CELLS = 128, 1 << 17
#: Smallest share of a tensor's cells that has to be constant: below it no plan is faster.
MIN_CONSTANT_SHARE = 0.1
#: Smallest side of an image's cell on spatial axes: neighbouring pixels of a tensor may be equal by chance, and a small
#: image's source would be asked about every few pixels, which takes longer than a step on them. Of a step on a bag of 9
#: patches of 128 x 128 it was 126 of 270 ms by cells of 8 pixels, and is 8 of 150 ms.
MIN_CELL_SIDE = 32


class Constants:
    """Constant cells of a map.

    Attributes:
        extent: Extent of the map.
        sides: Side of a cell on each axis.
        cells: Number of each cell: `UNKNOWN`, `VARIED`, or a constant's.
        keys: Key of each constant; the first has number 1.
        numbers: Number of each key.
    """

    def __init__(
        self,
        extent: Sequence[int],
        max_on_axis: int = MAX_CELLS_ON_AXIS,
        max_cells: int = MAX_CELLS,
        min_sides: Sequence[int] = (),
    ) -> None:
        counts = [max(1, min(size // side, max_on_axis)) for size, side in zip_longest(extent, min_sides, fillvalue=1)]
        while math.prod(counts) > max_cells:
            longest = counts.index(max(counts))
            counts[longest] = -(-counts[longest] // 2)
        self.extent = tuple(extent)
        self.sides = tuple(-(-size // count) for size, count in zip(extent, counts, strict=True))
        counts = [-(-size // side) for size, side in zip(extent, self.sides, strict=True)]
        self.cells = np.full(counts, UNKNOWN, dtype=np.int32)
        self.keys: list[bytes] = []
        self.numbers: dict[bytes | None, int] = {None: VARIED}

    def key_of_box(self, box: Box) -> bytes | None:
        """Return the key of the value on a box; None if the box is not known to be constant."""
        if not self.keys or box.empty:
            return None
        here = self.cells[self.cells_of(box)]
        first = int(here.flat[0])
        return self.keys[first - 1] if first > VARIED and bool((here == first).all()) else None

    def has_constant(self, box: Box) -> bool:
        """True if a cell that the box touches is known to be constant."""
        return bool(self.keys) and bool((self.cells[self.cells_of(box)] > VARIED).any())

    def mark_box(self, box: Box, key: bytes | None) -> None:
        """Mark the cells of a box that was written, with one value, or with several if the key is None."""
        self.mark_cells(self.cells_of(box), np.asarray(self.number_of(key)))

    def mark_tile(self, layout: Layout, tile: Tensor, box: Box) -> bytes | None:
        """Compare the values of a tile that was written, and mark its cells; return the key of the tile's value if it
        is constant."""
        values = as_integers(positions_first(layout, tile, box))
        starts = [self.cell_starts(a, lo, hi) for a, (lo, hi) in enumerate(box.intervals())]
        changes = [changes_along(values, a) for a in range(box.ndim)]
        if isinstance(values, FakeTensor):
            return None
        varied = sum((changes_per_cell(c, a, starts) for a, c in enumerate(changes)), np.zeros(1, dtype=np.int64))
        varied = np.broadcast_to(varied, [len(s) for s in starts])
        found = np.full(varied.shape, VARIED)
        constant = varied == 0
        if constant.any():
            index = np.ix_(*starts)
            rows = values[tuple(torch.from_numpy(i) for i in index)][torch.from_numpy(constant)]
            found[constant] = [self.number_of(key) for key in row_keys(rows.view(tile.dtype))]
        self.mark_cells(self.cells_of(box), found)
        first = int(found.flat[0])
        whole = first > VARIED and bool((found == first).all())
        return self.keys[first - 1] if whole else None

    def mark_cells(self, over: tuple[slice, ...], numbers: np.ndarray) -> None:
        """Mark cells that were written; a cell that was written before with another number is varied."""
        here = self.cells[over]
        self.cells[over] = np.where((here == UNKNOWN) | (here == numbers), numbers, VARIED)

    def number_of(self, key: bytes | None) -> int:
        if key is not None and key not in self.numbers:
            self.keys.append(key)
            self.numbers[key] = len(self.keys)
        return self.numbers[key]

    def cells_of(self, box: Box) -> tuple[slice, ...]:
        """Return the cells that a box touches."""
        return tuple(slice(lo // s, -(-hi // s)) for (lo, hi), s in zip(box.intervals(), self.sides, strict=True))

    def cell_starts(self, axis: int, lo: int, hi: int) -> np.ndarray:
        """Return the begins of the cells that an interval touches, relative to its own begin."""
        side = self.sides[axis]
        return np.maximum(np.arange(lo // side, -(-hi // side)) * side - lo, 0)

    @staticmethod
    def from_source(
        extent: Sequence[int],
        constant: Callable[[Box], Tensor | None],
        max_on_axis: int,
        max_cells: int,
        min_sides: Sequence[int] = (),
    ) -> Constants | None:
        """Find the constant parts of an image by bisection; None if there are none.

        The bisection ends early if no constant box is found before boxes are a sixteenth of the image on each axis.

        Args:
            extent: Extent of the image.
            constant: Returns the value of a box that the source knows to be constant.
            max_on_axis: Most cells on an axis.
            max_cells: Most cells in all.
            min_sides: Smallest side of a cell on each axis.
        """
        found = Constants(extent, max_on_axis, max_cells, min_sides)
        boxes, depth, patience = [Box.whole(found.cells.shape)], 0, 4 * len(found.cells.shape)
        while boxes and (depth <= patience or found.keys):
            parts: list[Box] = []
            for cells in boxes:
                value = constant(found.positions(cells))
                if value is not None or cells.positions == 1:
                    found.mark_cells(
                        tuple(map(slice, cells.lo, cells.hi)), np.asarray(found.number_of(constant_key(value)))
                    )
                else:
                    parts += halves(cells)
            boxes, depth = parts, depth + 1
        return found if found.keys else None

    @staticmethod
    def from_tensor(
        layout: Layout, tensor: Tensor, min_sides: Sequence[int] = (), min_share: float = 0.0
    ) -> Constants | None:
        """Find the constant parts of a tensor by comparing its values, at first two corners of each cell.

        Args:
            layout: Layout of the tensor.
            tensor: The tensor.
            min_sides: Smallest side of a cell on each axis.
            min_share: None is returned unless a greater share of the cells is constant.
        """
        if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
            return None
        found, whole = Constants(layout.extent, min_sides=min_sides), Box.whole(layout.extent)
        values = as_integers(positions_first(layout, tensor.detach(), whole))
        last = values[tuple(slice(side - 1, None, side) for side in found.sides)]  # views: there may be no memory
        first = values[tuple(slice(0, n * side, side) for n, side in zip(last.shape, found.sides, strict=False))]
        likely = (first == last).all(-1).cpu().numpy()
        if likely.mean() <= min_share:
            return None
        likely = np.pad(likely, [(0, n - m) for n, m in zip(found.cells.shape, likely.shape, strict=True)], "edge")
        cells = Box.whole(found.cells.shape)
        for row in np.flatnonzero(likely.any(tuple(range(1, likely.ndim)))).tolist():
            box = found.positions(cells.replace(0, row, row + 1))
            found.mark_tile(layout, layout.narrow(tensor.detach(), whole, box), box)
        return found if (found.cells > VARIED).mean() > min_share else None

    @property
    def is_constant(self) -> bool:
        """True if the whole map is one value."""
        return bool((self.cells == self.cells.flat[0]).all()) and bool(self.keys)

    def positions(self, cells: Box) -> Box:
        """Return the positions of a box of cells."""
        return Box(
            tuple(lo * side for lo, side in zip(cells.lo, self.sides, strict=True)),
            tuple(min(hi * side, size) for hi, side, size in zip(cells.hi, self.sides, self.extent, strict=True)),
        )


def halves(box: Box) -> list[Box]:
    """Cut a box into two along its longest axis."""
    axis = box.extent.index(max(box.extent))
    lo, hi = box.lo[axis], box.hi[axis]
    return [box.replace(axis, a, b) for a, b in pairwise((lo, (lo + hi) // 2, hi))]


def positions_first(layout: Layout, tile: Tensor, box: Box) -> Tensor:
    """Permute a tile to (positions on each axis..., values at a position)."""
    factors = [f for dim in layout.dims for f in dim]
    place = {f.index: i for i, f in enumerate(factors) if isinstance(f, Axis)}
    axes = [place[a] for a in range(box.ndim) if a in place]
    rest = [i for i in range(len(factors)) if i not in axes]
    values = layout.unflatten_factors(tile, box).permute(*axes, *rest).unsqueeze(-1).flatten(len(axes))
    for a in range(box.ndim):
        if a not in place:  # an axis of one position need not be in the layout
            values = values.unsqueeze(a)
    return values


def as_integers(values: Tensor) -> Tensor:
    """View values as integers, to compare them to the bit: 0.0 and -0.0 differ.

    Of a conjugate or a negative that PyTorch has not computed yet, the numbers in memory are compared.
    """
    values = values_in_memory(values)
    if values.is_complex():
        values = torch.view_as_real(values).flatten(-2)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(whole[values.dtype.itemsize])


def changes_along(values: Tensor, axis: int) -> Tensor:
    """Compare each position with the one before it on an axis; true if they differ."""
    count = values.shape[axis]
    return (values.narrow(axis, 1, count - 1) != values.narrow(axis, 0, count - 1)).any(-1)


def changes_per_cell(changes: Tensor, axis: int, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Count the positions in each cell that differ from the one before them on an axis."""
    found = changes.cpu().numpy().astype(np.int64)
    first = np.zeros_like(found, shape=[*found.shape[:axis], 1, *found.shape[axis + 1 :]])
    found = np.concatenate([first, found], axis)
    np.moveaxis(found, axis, 0)[starts[axis]] = 0  # differences between two cells
    for a, at in enumerate(starts):
        found = np.add.reduceat(found, at, axis=a)
    return found


def constant_key(value: Tensor | None) -> bytes | None:
    return None if value is None else value_key(value)


def value_key(values: Tensor) -> bytes:
    """Return a key that is equal for equal values of one type."""
    return row_keys(values.reshape(1, -1))[0]


def row_keys(rows: Tensor) -> list[bytes]:
    """Return the key of each row."""
    numbers = dense_bytes(rows)
    kind = str(rows.dtype).encode()
    return [kind + row for row in numbers.view(f"V{numbers.shape[1]}").ravel().tolist()]


@dataclass(frozen=True, eq=False)
class TileNumbers:
    """Numbers of a map's tiles; see [Note: stored once].

    Attributes:
        ends: Cuts of the map on each axis.
        numbers: Number of each tile; 0 is none.
        representatives: Flat index of the tile whose contents are stored for each tile.
    """

    ends: tuple[np.ndarray, ...]
    numbers: np.ndarray
    representatives: np.ndarray

    @staticmethod
    def empty(ends: Sequence[Sequence[int]]) -> TileNumbers:
        """Make tiles without numbers, each its own representative."""
        numbers = np.zeros([len(e) - 1 for e in ends], dtype=np.int64)
        return TileNumbers(tuple(map(np.asarray, ends)), numbers, np.arange(numbers.size).reshape(numbers.shape))

    def assign(self, boxes: Sequence[Box], number: int) -> None:
        """Assign a number to the tiles of some boxes; the first is the representative."""
        places = [tuple(s.start for s in self.tiles_of(box)) for box in boxes]
        for place in places:
            self.numbers[place] = number
            self.representatives[place] = np.ravel_multi_index(places[0], self.representatives.shape)

    def tiles_of(self, box: Box) -> tuple[slice, ...]:
        """Return the indices of the tiles that a box touches."""
        return tuple(
            slice(int(np.searchsorted(e, lo, "right")) - 1, int(np.searchsorted(e, hi, "left")))
            for e, (lo, hi) in zip(self.ends, box.intervals(), strict=True)
        )

    def signature(self, box: Box) -> Hashable:
        """Return a key that is equal for boxes at equal positions in tiles of equal numbers."""
        over = self.tiles_of(box)
        axes = zip(self.ends, over, box.lo, strict=True)
        edges = tuple(tuple((e[s.start : s.stop + 1] - lo).tolist()) for e, s, lo in axes)
        return edges, self.numbers[over].tobytes()

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the parts of a box, each with its box in the representative tile."""
        over = self.tiles_of(box)
        shape, begin = self.representatives.shape, [s.start for s in over]
        own = np.ravel_multi_index(np.ix_(*(np.arange(s.start, s.stop) for s in over)), shape)
        if (self.representatives[over] == own).all():
            yield box, box
            return
        for index, first in np.ndenumerate(self.representatives[over]):
            place = tuple(b + i for b, i in zip(begin, index, strict=True))
            lo, there = self.corner(place), self.corner(np.unravel_index(first, shape))
            tile = Box(lo, self.corner([i + 1 for i in place])).intersect(box)
            yield tile, tile.shift([b - a for a, b in zip(lo, there, strict=True)])

    @property
    def shared_positions(self) -> int:
        """Number of positions of all tiles that have another representative, and are not stored."""
        count = self.representatives != np.arange(self.representatives.size).reshape(self.representatives.shape)
        for ends in reversed(self.ends):
            count = count @ np.diff(ends)
        return int(count)

    def corner(self, place: Sequence[int]) -> tuple[int, ...]:
        """Return the lower corner of the tile at an index."""
        return tuple(int(e[i]) for e, i in zip(self.ends, place, strict=True))


def stored_parts(made: TileNumbers | None, box: Box) -> list[tuple[Box, Box]]:
    """Return the parts of a box, each with the box where it is stored."""
    return [(box, box)] if made is None else list(made.parts(box))
