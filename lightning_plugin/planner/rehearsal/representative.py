"""The tiles of a grid that a rehearsal runs: those that can be the worst.

Which they are is said by a model: the one whose maps are largest together, copies that are padded at borders included,
holds most. Of those that hold and pad the same one is run, and none where another has all maps as large.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_plugin.boxes import Box, Grid, telling
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import TileOp
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.peak import is_padded, tile_bytes
from lightning_plugin.program.program import Program
from lightning_plugin.rules.split import splits_of

#: About how many operators are run for each grid of a network, tiles together: a small network can afford more tiles.
EFFORT = 240
#: But not more than so many tiles beside the first: with nine, none of 29 plans was found to hold more.
MOST_TILES = 4
#: Of grids of so few tiles, all are run where transfers go ahead.
FEW_TILES = 4


@dataclass(frozen=True, eq=False)
class Candidate:
    """A tile that may be the worst: what it owns, the sizes of its maps and padded copies, and the bytes of each."""

    owned: tuple[Box, ...]
    sizes: tuple[int, ...]
    bytes: tuple[int, ...]

    @cached_property
    def weight(self) -> int:
        """The bytes of all together."""
        return sum(self.bytes)

    def within(self, other: Candidate) -> bool:
        """Whether another tile has all maps as large."""
        return within(self.sizes, other.sizes)


def within(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a <= b for a, b in zip(one, other, strict=True))


def effort(network: Network) -> int:
    """How many of the worst tiles are run of each grid."""
    return min(MOST_TILES, max(1, EFFORT // len(network.order)))


def representative(program: Program, grid: Grid, worst: int, ahead: bool) -> Iterator[Sequence[Box]]:
    """The first tile, after which gradients are there to be added to, and so many of the worst.

    Where transfers go ahead, a tile meets those of the tiles before and after it: each of the worst runs between two
    that are as large as any, which are not in all images its neighbours.
    """
    if ahead and grid.tiles <= FEW_TILES:
        yield from grid.partition([t.map.space.extent for t in program.targets])
        return
    first, *rest = among = candidates(program, grid)
    if ahead and len(among) < FEW_TILES:  # others of the grid have no share
        yield from (c.owned for c in among)
        return
    if not ahead:
        yield first.owned
        yield from (c.owned for c in heaviest(rest, worst))
        return
    large = sorted(among, key=lambda c: c.weight, reverse=True)
    for c in heaviest(among, worst):
        before, after, *_ = (other for other in large if other is not c)
        yield from (before.owned, c.owned, after.owned)


def heaviest(among: Sequence[Candidate], worst: int) -> list[Candidate]:
    """So many of the worst tiles."""
    kinds = {c.sizes: c for c in reversed(among)}
    found: list[Candidate] = []
    for c in sorted(kinds.values(), key=lambda c: c.weight, reverse=True):
        if len(found) < worst and not any(c.within(other) for other in kinds.values() if other is not c):
            found.append(c)
    return found


def candidates(program: Program, grid: Grid) -> list[Candidate]:
    """Corners, edges, the inside and where splits meet; of grids of few tiles, all."""
    lines = Lines.of(program, grid)
    return lines.candidates(itertools.product(*map(range, lines.counts)))


def worst_sizes(program: Program, grid: Grid, count: int) -> tuple[tuple[int, ...], ...]:
    """Of the worst tiles, so many, the bytes of their maps and padded copies. Of tiles that are as large and lie alike
    on every axis one is looked at."""
    lines = Lines.of(program, grid)
    return tuple(c.bytes for c in heaviest(lines.candidates(itertools.product(*lines.distinct)), count))


@dataclass(frozen=True)
class Lines:
    """The tiles along a grid's axes: ``picks`` are the telling indices on each axis, ``along`` the boxes of the tiles
    that have the same pick on every axis.

    What a box is on one axis depends on nothing but the tile's index there: the boxes of all other tiles are put
    together of these.
    """

    program: Program
    grid: Grid
    ends: list[list[tuple[int, ...]]]
    picks: list[list[int]]
    along: list[dict[int, Box]]

    @staticmethod
    def of(program: Program, grid: Grid) -> Lines:
        ends = grid.ends([t.map.space.extent for t in program.targets])
        picks = [sorted({*telling(count), *at_seams(program, ends, axis)}) for axis, count in enumerate(grid.counts)]
        along = [program.boxes(grid.owned(ends, line)) for line in itertools.zip_longest(*picks, fillvalue=0)]
        return Lines(program, grid, ends, picks, along)

    @property
    def counts(self) -> list[int]:
        """How many picks there are on each axis."""
        return [len(pick) for pick in self.picks]

    @cached_property
    def maps(self) -> dict[int, Value]:
        return {id(v): v for n in self.program.steps for v in (*n.maps, *n.outputs) if v.is_map}

    @cached_property
    def whole(self) -> bool:
        """Whether all maps have the grid's axes, so that boxes can be put together."""
        same = all(need.keys() == self.along[0].keys() for need in self.along)
        return same and all(len(v.space.extent) == len(self.picks) for v in self.maps.values())

    @property
    def distinct(self) -> list[list[int]]:
        """Of each axis, the places of picks that differ in more than where they lie."""
        if not self.whole:
            return [list(range(count)) for count in self.counts]
        return [
            list({self.look(axis, place): place for place in reversed(range(count))}.values())
            for axis, count in enumerate(self.counts)
        ]

    def look(self, axis: int, place: int) -> Hashable:
        """How long the boxes are at a pick of an axis, and what operators make of where they lie."""
        need = self.along[place]
        marks = (
            n.op.mark(axis, need[id(n.outputs[0])].lo[axis], need[id(n.outputs[0])].hi[axis])
            for n in self.program.steps
            if isinstance(n.op, TileOp) and id(n.outputs[0]) in need
        )
        return tuple(box.hi[axis] - box.lo[axis] for box in need.values()), tuple(marks)

    def candidates(self, tiles: Iterable[Sequence[int]]) -> list[Candidate]:
        """The tiles with these picks that own something, by their places."""
        found = []
        for places in tiles:
            index = [pick[i] for pick, i in zip(self.picks, places, strict=True)]
            owned = self.grid.owned(self.ends, index)
            if not all(b.empty for b in owned):
                need = put_together(self.along, places) if self.whole else self.program.boxes(owned)
                found.append(candidate(self.program, self.maps, owned, need))
        return found


def at_seams(program: Program, ends: Sequence[Sequence[tuple[int, ...]]], axis: int) -> Iterator[int]:
    """The indices of tiles in which a map is cut into splits: they join the splits' results."""
    for _, split in splits_of(program.steps):
        for a, seam in zip(split.inner.axes, split.seams, strict=True):
            if a == axis:
                size = seam.makes[-1]
                for cut in seam.makes[1:-1]:
                    index = bisect_right(ends[0][axis], cut * ends[0][axis][-1] // size) - 1
                    yield from (i for i in (index - 1, index, index + 1) if 0 <= i < len(ends[0][axis]) - 1)


def put_together(along: Sequence[Mapping[int, Box]], places: Sequence[int]) -> dict[int, Box]:
    """The boxes of a tile that has an index of its own on each axis, from those of tiles that have the same on all."""
    return {key: Box.of((along[i][key].lo[a], along[i][key].hi[a]) for a, i in enumerate(places)) for key in along[0]}


def candidate(program: Program, maps: dict[int, Value], owned: tuple[Box, ...], need: dict[int, Box]) -> Candidate:
    pads = [padding(node, need) for node in program.steps]
    sizes = (*(n for key in maps for n in (need[key].extent if key in need else ())), *pads)
    tiles = (tile_bytes(v, need[key]) if key in need else 0 for key, v in maps.items())
    return Candidate(owned, sizes, (*tiles, *pads))


def padding(node: Node, need: dict[int, Box]) -> int:
    """The copy of its input that a window operator pads by hand."""
    box = need.get(id(node.outputs[0]))
    return tile_bytes(node.maps[0], need[id(node.maps[0])]) if box is not None and is_padded(node, box) else 0
