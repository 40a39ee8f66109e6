"""Share of different tiles in a grid, where images are known to be constant in part.

[Note: shared work] A tile is identical to others if all of the image that it sees is one value. A map's *reach* is the
part of an image that a box of the map sees: on each axis, an interval of the box times a scale, wider by the windows on
the way. A summed-area table of the image's cells counts the tiles of a grid that see no tissue at once. They are
computed once for each way to lie at the border; backward shares them where no map that they read needs a gradient. All
of this predicts seconds; at run time the tiles themselves find what they share ([Note: identical tiles] in
`execute.tile_pass`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import VARIED, Constants
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Spread, TileOp
from lightning_plugin.program.program import Program

#: Shares of background between which images are planned alike.
STEPS = (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0)


#: The share of a segment's tiles that are computed if no tile is like another.
ALL = 1.0


@dataclass(frozen=True)
class Side:
    """Reach of a map on one axis of an image: its interval ``[lo, hi)`` sees ``[scale · lo - before, scale · hi +
    after)``."""

    scale: float = 1.0
    before: float = 0.0
    after: float = 0.0

    def through(self, inner: Side) -> Side:
        """Composition of two reaches: this one's of a map, and that map's of the image (``inner``)."""
        before, after = inner.scale * self.before + inner.before, inner.scale * self.after + inner.after
        return Side(inner.scale * self.scale, before, after)

    def hull(self, other: Side) -> Side:
        """The smallest reach that contains both."""
        scale = max(self.scale, other.scale)
        return Side(scale, max(self.before, other.before), max(self.after, other.after))


#: Reach of a map in an image, axis by axis; None if it sees all of the image.
Reach = tuple[Side, ...] | None


class Background:
    """The cells of one image, and the reach of each map of a network in it."""

    def __init__(self, known: Constants, image: Value, order: Sequence[Node]) -> None:
        self.known = known
        self.reach: dict[Value, Reach] = {image: tuple(Side() for _ in known.extent)}
        for node in order:
            found = self.reach_of(node)
            self.reach.update({v: found for v in node.outputs if v.is_map and found != ()})

    def reach_of(self, node: Node) -> Reach:
        """Reach of a node's result in the image; () if it sees none of it, None if it sees all."""
        inputs = [(i, self.reach[v]) for i, v in enumerate(node.maps) if v in self.reach]
        if not inputs or not node.outputs[0].is_map or not isinstance(node.op, TileOp):
            return ()
        if any(reach is None for _, reach in inputs):
            return None
        steps = reaches_of_position(node.op, node.outputs[0].space.extent, node.maps)
        found: Reach = ()
        for i, reach in inputs:
            step = steps[i]
            assert reach is not None
            if step is None or len(step) != len(reach):
                return None
            here = tuple(s.through(r) for s, r in zip(step, reach, strict=True))
            found = tuple(a.hull(b) for a, b in zip(found, here, strict=True)) if found else here
        return found

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """Summed tables of the cells that vary, and on each axis of those that differ from the one before."""
        cells = self.known.cells
        marks = [cells <= VARIED]
        for a in range(cells.ndim):
            first = np.zeros_like(cells, dtype=bool, shape=[*cells.shape[:a], 1, *cells.shape[a + 1 :]])
            marks.append(np.concatenate([first, np.diff(cells, axis=a) != 0], a))
        return [summed(m) for m in marks]

    def constant(self, lo: Sequence[np.ndarray], hi: Sequence[np.ndarray]) -> np.ndarray:
        """A mask of boxes of the image, given by their ends on each axis, that are known to be one value."""
        ends = []
        for a, (los, his) in enumerate(zip(lo, hi, strict=True)):
            side, size = self.known.sides[a], self.known.extent[a]
            first = np.floor(np.clip(los, 0, size - 1) / side).astype(np.int64)
            last = np.ceil(np.clip(his, 1, size) / side).astype(np.int64)
            ends.append((first, np.maximum(last, first + 1)))
        varied = sums(self.tables[0], ends)
        for a, table in enumerate(self.tables[1:]):  # the first cell of a box may differ from the one before it
            inside = [(f + (i == a), last) for i, (f, last) in enumerate(ends)]
            varied = varied + sums(table, inside)
        return varied == 0

    def constant_tiles(self, grid: Grid, maps: Sequence[Value]) -> np.ndarray | None:
        """A mask of a grid's tiles that see one value only; None if no map reads the image."""
        extents = [v.space.extent for v in maps]
        found: np.ndarray | None = None
        for v, ends in zip(maps, grid.ends(extents), strict=True):
            reach = self.reach.get(v, ())
            if reach is None or len(reach) > len(ends):
                return np.zeros(1, dtype=bool)
            if not reach:
                continue
            lo, hi = [], []
            for a, side in enumerate(reach):
                at = np.asarray(ends[a], dtype=float)
                lo.append(side.scale * at[:-1] - side.before)
                hi.append(side.scale * at[1:] + side.after)
            here = self.constant(lo, hi)
            found = here if found is None else found & here
        return found


@dataclass(frozen=True)
class Scene:
    """The background of all images of a network."""

    background: tuple[Background, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.background)

    def distinct(self, program: Program, grid: Grid) -> float:
        """The share of a program's tiles that differ from all others."""
        if not self.background or grid.tiles < 2 or not all(node.op.uniform for node in program.nodes):
            return ALL
        maps = [t.map for t in program.targets]
        seen = [here for background in self.background if (here := background.constant_tiles(grid, maps)) is not None]
        if not seen:
            return ALL
        found = reduce(np.logical_and, seen)
        kinds = math.prod(min(3, n) for n in found.shape)  # first, inner or last along each axis
        alike = int(found.sum())
        return (found.size - alike + min(alike, kinds)) / max(1, found.size)


def parts_of_background(known: Iterable[Constants | None]) -> tuple[int, ...]:
    """Coarse shares of background of images, by which plans are told apart; () if none is known.

    An image counts with the least share among the images that know theirs: tiles that read several are alike where all
    are.
    """
    found = tuple(-1 if k is None else step(float((k.cells > VARIED).mean())) for k in known)
    least = min((i for i in found if i >= 0), default=None)
    return () if least is None else tuple(min(i, least) for i in found)


def step(part: float) -> int:
    """Number of the coarse step that a share of background lies in."""
    return sum(part > s for s in STEPS)


def reaches_of_position(op: TileOp, extent: Sequence[int], maps: Sequence[Value]) -> list[tuple[Side, ...] | None]:
    """Reach of one position of an operator's result in each map that it reads; None if it is no interval that moves
    with the position. It is found from two boxes in the middle."""
    middle = [size // 2 for size in extent]
    apart = [max(1, size // 8) for size in extent]
    if any(m + d >= size > 1 for m, d, size in zip(middle, apart, extent, strict=True)):
        return [None] * len(maps)
    one = op.need(Box.of((m, m + 1) for m in middle))
    other = op.need(Box.of((m + d, m + d + 1) if size > 1 else (m, m + 1) for m, d, size in
                           zip(middle, apart, extent, strict=True)))  # fmt: skip
    found: list[tuple[Side, ...] | None] = []
    for here, there in zip(one, other, strict=True):
        if here.ndim != len(extent):
            found.append(None)
            continue
        sides = []
        for a in range(here.ndim):
            scale = (there.lo[a] - here.lo[a]) / apart[a] if extent[a] > 1 else 1.0
            sides.append(Side(scale, scale * middle[a] - here.lo[a], here.hi[a] - scale * (middle[a] + 1)))
        found.append(tuple(sides))
    return found


def summed(marks: np.ndarray) -> np.ndarray:
    """The summed table of an array: with a row of zeros before the first on each axis."""
    table = np.pad(marks.astype(np.int64), [(1, 0)] * marks.ndim)
    for a in range(marks.ndim):
        table = table.cumsum(a)
    return table


def sums(table: np.ndarray, ends: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The sums over all boxes whose ends on each axis are given."""
    for a, (first, last) in enumerate(ends):
        last = np.maximum(last, first)
        table = table.take(last, axis=a) - table.take(first, axis=a)
    return table


def scene(images: Mapping[Value, Constants | None], order: Sequence[Node]) -> Scene:
    """The background of a network's images. An image of which none is known, and a map spread from a vector, is taken
    to differ everywhere."""
    if all(known is None for known in images.values()):
        return Scene()
    spread = {v: None for n in order for v in n.maps if v.node is not None and isinstance(v.node.op, Spread)}
    known = ((v, known or Constants(v.space.extent, 1)) for v, known in {**spread, **images}.items())
    return Scene(tuple(Background(cells, v, order) for v, cells in known))
