"""Tile grids that are tried for an interval, from coarse to fine, and the tiles that stand for all tiles of a grid."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_plugin.boxes import Box, Grid, nonempty_pieces
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.program.program import Program

#: Tiles on the longest axis that are tried; more come in steps of a third, as a finer choice changes little.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Tiles of fewer positions along each side cost more than background can save.
FINEST = 4
#: Of a scan every tile is planned and rehearsed, so that there are not more than these.
SCANS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def nested(inner: tuple[int, ...], images: tuple[int, ...], among: list[tuple[int, ...]]) -> list[Grid]:
    """Grids whose tiles have sides of powers of two, so that the background tiles of one segment are nested in those of
    the segment before: see [Note: identical tiles] in `execute.tile_pass`."""
    found = [Grid((*(1 for _ in inner), *counts)) for counts in among]
    longest = max(inner, default=1)
    side = 1 << max(0, longest - 1).bit_length()
    sides = tuple(-(-size // count) for size, count in zip(images, among[-1], strict=True))
    while side > max(FINEST, longest // COUNTS[-1]):  # the tiles of finer grids alone would fill the memory
        side //= 2
        counts = tuple(-(-size // side) for size in inner)
        found.append(Grid((*counts, *among[-1]), (*(side for _ in inner), *sides)))
    return found


def image_counts(images: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Numbers of pieces along each axis of images, from coarse to fine: the first axis until each of its images is
    alone, then the next."""
    found = [tuple(1 for _ in images)]
    for axis, size in enumerate(images):
        counts = sorted({nonempty_pieces(size, c) for c in COUNTS if 1 < c <= size})
        while (counts or [1])[-1] < size:
            counts.append(min(size, 2 * (counts or [1])[-1]))
        found += [(*images[:axis], c, *(1 for _ in images[axis + 1 :])) for c in counts]
    return found


def row_grid(like: tuple[int, ...], count: int) -> Grid:
    """A grid that cuts the first axis only."""
    return Grid((nonempty_pieces(like[0], count), *(1 for _ in like[1:])))


def sample_indices(count: int) -> list[tuple[int, int]]:
    """(index, number of tiles it stands for) along one axis: the first, a middle one, the last."""
    if count <= 3:
        return [(i, 1) for i in range(count)]
    return [(0, 1), (count // 2, count - 2), (count - 1, 1)]


@dataclass(frozen=True)
class SampleTiles:
    """The first, a middle and the last tile of a grid, on all axes at once.

    The interval of a box on one axis depends on the tile's index on that axis only, so three tiles have all extents of
    nine (or, in a volume, of 27): the sum over all tiles of a box's positions is a product of sums.
    """

    program: Program
    grid: Grid

    @cached_property
    def picks(self) -> list[list[tuple[int, int]]]:
        return [sample_indices(count) for count in self.grid.counts]

    @cached_property
    def ends(self) -> list[list[tuple[int, ...]]]:
        return self.program.cuts(self.grid)

    @cached_property
    def count(self) -> int:
        """The number of sampled tiles, which is the largest number of samples on an axis."""
        return max(map(len, self.picks))

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Results that others have computed for each tile. Its boxes are not among them: they are many, and quick to
        find again."""
        return {}

    def boxes(self, i: int) -> dict[Value, Box] | None:
        """Boxes of all maps that sample ``i`` holds; None if it has no share in any target."""
        index = [picks[min(i, len(picks) - 1)][0] for picks in self.picks]
        owned = self.grid.owned(self.ends, index)
        return None if all(b.empty for b in owned) else self.program.boxes(owned)

    @cached_property
    def shares(self) -> np.ndarray:
        """For each of the program's nodes, the work of all tiles as a multiple of the whole node: 1 if nothing is
        computed twice."""
        needs = [need for need in map(self.boxes, range(self.count)) if need is not None]
        return np.array([self.share(node, needs) for node in self.program.nodes])

    def share(self, node: Node, needs: Sequence[Mapping[Value, Box]]) -> float:
        """The work of all tiles on one node as a multiple of the whole node."""
        v = node.maps[0] if isinstance(node.op, ReduceOp) else node.outputs[0]
        boxes = [need.get(v) for need in needs]
        product = 1.0
        for a, size in enumerate(v.space.extent):
            picks = self.picks[a] if a < len(self.picks) else [(0, 1)]
            lengths = 0
            for i, (_, times) in enumerate(picks):
                box = boxes[min(i, len(boxes) - 1)]
                if box is not None and box.hi[a] > box.lo[a]:
                    lengths += times * (box.hi[a] - box.lo[a])
            product *= lengths / max(1, size)
        return product
