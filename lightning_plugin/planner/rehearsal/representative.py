"""The tiles of a grid that a rehearsal runs: those that can be the worst.

A tile's weight is the bytes of all its maps, copies at borders included. The heaviest tiles are run; of tiles of equal
sizes one is, and none of which another has all maps as large.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_plugin.boxes import Box, Grid, index_on_axis, representative_indices
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import TileOp
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.peak import is_padded, may_pad, tile_bytes
from lightning_plugin.program.program import Program

#: Operators that are run for each grid of a network, all tiles together: a small network can afford more tiles.
EFFORT = 240
#: Tiles beside the first: with nine, none of 29 plans was found to hold more.
MOST_TILES = 4
#: If transfers go ahead, all tiles of a grid of no more tiles are run.
FEW_TILES = 4
#: Tiles further inside than the second that are looked at if they hold maps up to a border.
MOST_REACHING = 8


@dataclass(frozen=True, eq=False)
class Candidate:
    """A tile that may be the worst.

    Attributes:
        owned: The boxes of the targets that it owns.
        sizes: The extents of its maps, and the bytes of copies.
        bytes: The bytes of each map and copy.
    """

    owned: tuple[Box, ...]
    sizes: tuple[int, ...]
    bytes: tuple[int, ...]

    @cached_property
    def weight(self) -> int:
        """The bytes of all maps and copies together."""
        return sum(self.bytes)

    def is_nowhere_larger(self, other: Candidate) -> bool:
        """True if another tile has all maps as large."""
        pairs = zip(self.sizes, other.sizes, strict=False)
        return len(self.sizes) == len(other.sizes) and all(a <= b for a, b in pairs)


def count_heaviest(network: Network) -> int:
    """The number of heaviest tiles that are run of each grid."""
    return min(MOST_TILES, max(1, EFFORT // len(network.order)))


def representative(program: Program, grid: Grid, count: int, ahead: bool) -> Iterator[tuple[Box, ...]]:
    """The tiles that a rehearsal runs."""
    if ahead and grid.tiles <= FEW_TILES:
        yield from program.owned(grid)
    else:
        yield from (c.owned for turn in groups(program, grid, count, ahead) for c in turn)


def groups(program: Program, grid: Grid, count: int, ahead: bool) -> list[tuple[Candidate, ...]]:
    """Groups of tiles to run: the first tile, which makes the gradients that others add to, and the ``count`` heaviest,
    each with the tiles that run before and after it.

    If transfers go ahead, a tile overlaps with those before and after it: each of the worst runs between two that are
    as large as any, which are not in all images its neighbours. In a grid of few tiles all run as they are. And each
    target has a share in some tile that runs: in a grid that follows another map, the first tile may have none.
    """
    among = DistinctTiles(program, grid).candidates()
    found = heaviest_groups(among, grid, count, ahead)
    for place in range(len(program.targets)):
        if all(c.owned[place].empty for turn in found for c in turn):
            found += [(c,) for c in among if not c.owned[place].empty][:1]
    return found


def heaviest_groups(among: Sequence[Candidate], grid: Grid, count: int, ahead: bool) -> list[tuple[Candidate, ...]]:
    """The same groups, whatever the targets."""
    first, *rest = among
    if not ahead:
        return [(first,), *((c,) for c in heaviest(rest, count))]
    if grid.tiles <= FEW_TILES or len(among) < FEW_TILES:  # others of the grid have no share
        return [tuple(among)]
    large = sorted(among, key=lambda c: c.weight, reverse=True)
    found: list[tuple[Candidate, ...]] = []
    for c in heaviest(among, count):
        before, after, *_ = (other for other in large if other is not c)
        found.append((before, c, after))
    return found


def heaviest(among: Sequence[Candidate], count: int) -> list[Candidate]:
    """The heaviest tiles, of which none has all maps as large as another."""
    kinds = {c.sizes: c for c in reversed(among)}
    found: list[Candidate] = []
    for c in sorted(kinds.values(), key=lambda c: c.weight, reverse=True):
        if len(found) < count and not any(c.is_nowhere_larger(other) for other in kinds.values() if other is not c):
            found.append(c)
    return found


@dataclass(frozen=True)
class DistinctTiles:
    """The tiles of a grid that may differ from all others: corners, edges, the inside, seams of splits, and tiles that
    reach a border; of a grid of few tiles, all. Their indices along an axis are its *picks*."""

    program: Program
    grid: Grid

    @cached_property
    def ends(self) -> list[list[tuple[int, ...]]]:
        return self.program.cuts(self.grid)

    @cached_property
    def picks(self) -> list[list[int]]:
        found = []
        for axis, count in enumerate(self.grid.counts):
            seen = {*representative_indices(count), *at_seams(self.program, self.ends, axis)}
            found.append(sorted({*seen, *self.reaching_border(axis)}))
        return found

    def reaching_border(self, axis: int) -> Iterator[int]:
        """Indices of tiles further inside that hold maps up to a border, where operators pad: tiles shorter than the
        receptive field."""
        count = self.grid.counts[axis]
        for last, inwards in ((1, 1), (count - 2, -1)):
            for index in range(last, last + inwards * MOST_REACHING, inwards):
                if not 0 < index < count - 1 or not self.touches_border(index, axis, inwards > 0):
                    break
                yield index + inwards

    def touches_border(self, index: int, axis: int, low: bool) -> bool:
        """True if some box of the tile at an index on an axis reaches the first position of that axis, or the last."""
        boxes = self.program.boxes(self.grid.owned(self.ends, index_on_axis(index, axis, len(self.grid.counts))))
        found = ((v.space.extent, boxes[v]) for v in self.maps if v in boxes)
        return any(
            len(extent) > axis and not box.empty and (box.lo[axis] == 0 if low else box.hi[axis] == extent[axis])
            for extent, box in found
        )

    @cached_property
    def maps(self) -> tuple[Value, ...]:
        maps = (v for n in self.program.nodes for v in (*n.maps, *n.outputs) if v.is_map)
        return tuple(dict.fromkeys(maps))

    @cached_property
    def copying(self) -> list[Node]:
        """The operators that may pad a copy of their input, or join parts of their result."""
        return [n for n in self.program.nodes if may_pad(n) or may_join(n)]

    def candidates(self) -> list[Candidate]:
        """The tiles that own something."""
        found = (self.grid.owned(self.ends, index) for index in itertools.product(*self.picks))
        return [self.candidate(owned) for owned in found if not all(b.empty for b in owned)]

    def candidate(self, owned: tuple[Box, ...]) -> Candidate:
        """The tile that owns these boxes."""
        boxes = self.program.boxes(owned)
        held = [v for v in self.maps if v in boxes]
        copies = [copy_bytes(node, boxes) for node in self.copying]
        extents = itertools.chain(*(boxes[v].extent for v in held))
        return Candidate(owned, (*extents, *copies), (*(tile_bytes(v, boxes[v]) for v in held), *copies))


def at_seams(program: Program, ends: Sequence[Sequence[tuple[int, ...]]], axis: int) -> Iterator[int]:
    """Indices of tiles in which an operator joins parts of its result."""
    for node in program.nodes:
        if isinstance(node.op, TileOp):
            for cut in node.op.part_bounds(axis):
                size = node.outputs[0].space.extent[axis]
                index = bisect_right(ends[0][axis], cut * ends[0][axis][-1] // size) - 1
                yield from (i for i in (index - 1, index, index + 1) if 0 <= i < len(ends[0][axis]) - 1)


def may_join(node: Node) -> bool:
    """True if an operator joins parts of its result for some box."""
    return isinstance(node.op, TileOp) and type(node.op).is_concatenation is not TileOp.is_concatenation


def copy_bytes(node: Node, boxes: Mapping[Value, Box]) -> int:
    """Bytes of the copies that some boxes need: of an input that an operator pads by hand, or of a result that it
    joins."""
    box = boxes.get(node.outputs[0])
    if box is None:
        return 0
    if is_padded(node, box):
        return tile_bytes(node.maps[0], boxes[node.maps[0]])
    return tile_bytes(node.outputs[0], box) if may_join(node) and node.op.is_concatenation(box) else 0  # type: ignore[attr-defined]
