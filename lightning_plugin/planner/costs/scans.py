"""Rows that the tiles of a scan hold, known for all programs with the same end together.

[Note: ends] The rows of a node in a scan depend on no node before it: see [Note: scan] in `program.scan`. The search
asks for every interval between two cuts. Those that end at one cut, and whose tiles are cut alike, share their nodes'
rows; an interval that begins earlier adds the nodes before those that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.planner.costs.peak import tile_bytes
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.scan import Rows, ScanNeeds, scan_axis


class TilePart(NamedTuple):
    """A node's part in one tile of a scan.

    Attributes:
        box: The box of its result that the tile holds.
        wanted: The boxes that it needs of the maps it reads.
        twice: Bytes that are there twice if the fresh rows are saved apart from those they are joined to.
    """

    box: Box | None
    wanted: tuple[Box, ...]
    twice: int


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part in a scan.

    Attributes:
        share: The work of all tiles as a multiple of the whole node.
        kept: Bytes that each tile hands on.
        held: Its part in the tiles that stand for all.
    """

    share: float
    kept: tuple[int, ...]
    held: tuple[TilePart, ...]


class Scans:
    """Scans of programs with the same end, on one grid, whose smallest targets have one extent."""

    def __init__(self, program: Program, grid: Grid) -> None:
        self.grid = grid
        self.extent = program.reference
        tiles = len(list(program.owned(grid)))
        #: Tiles that may hold most: the first, which computes all rows of its halo, and one in the middle.
        self.samples = sorted({0, tiles // 2})
        self.needs = ScanNeeds(scan_axis(grid), tiles)
        self.known: dict[int, Part] = {}
        self.refused: PlanError | None = None

    @property
    def tiles(self) -> int:
        return len(self.needs.pending)

    def parts(self, program: Program) -> list[Part]:
        """The parts of a program's nodes, in their order."""
        targets = {t.node.serial: t for t in program.targets}
        for node in reversed(program.nodes):
            if node.serial not in self.known:
                if self.refused is not None:
                    raise self.refused
                self.known[node.serial] = self.part_of(node, targets.get(node.serial))
        return [self.known[node.serial] for node in program.nodes]

    def shares(self, program: Program) -> np.ndarray:
        """For each of a program's nodes, the work of all tiles as a multiple of the whole node."""
        return np.array([part.share for part in self.parts(program)])

    def part_of(self, node: Node, target: Target | None) -> Part:
        """The part of one node, which is not known yet."""
        owned = None if target is None else self.owned(target)
        try:
            rows = self.needs.rows_of(node, owned)
        except PlanError as error:
            self.refused = error  # and so is whatever begins earlier
            raise
        return self.part(node, rows)

    def owned(self, target: Target) -> list[Box]:
        """The box that each tile owns of a target; in a grid of more tiles than rows the last own none."""
        ends = self.grid.ends([target.map.space.extent], self.extent)
        found = (self.grid.owned(ends, index) for index in self.grid.indices())
        return [box for (box,) in found][: self.tiles]

    def part(self, node: Node, rows: Rows) -> Part:
        """The part of a node that computes and hands on these rows."""
        held = tuple(self.held(node, rows, i) for i in self.samples)
        if isinstance(node.op, ReduceOp):
            return Part(1.0, (0,) * self.tiles, held)
        out = node.outputs[0]
        computed = sum(box.positions for box in rows.fresh if box is not None)
        return Part(
            computed / max(1, Box.whole(out.space.extent).positions),
            tuple(0 if box is None else tile_bytes(out, box) for box in rows.kept),
            held,
        )

    def held(self, node: Node, rows: Rows, i: int) -> TilePart:
        """A node's part in the tile with a number."""
        if isinstance(node.op, ReduceOp):
            return TilePart(None, rows.wanted[i], 0)
        fresh, given = rows.fresh[i], rows.carried[i]
        twice = tile_bytes(node.outputs[0], fresh) if fresh is not None and given is not None else 0
        box = fresh if given is None else given if fresh is None else given.hull(fresh)
        return TilePart(box, rows.wanted[i], twice)


def held(program: Program, parts: Sequence[Part], sample: int) -> dict[Value, Box]:
    """The boxes of every map that one of the tiles that stand for all holds."""
    found: dict[Value, Box] = {}
    reads = set(program.reads)
    for node, part in zip(program.nodes, parts, strict=True):
        here = part.held[sample]
        if here.box is not None:
            found[node.outputs[0]] = here.box
        for v, box in zip(node.maps, here.wanted, strict=False):
            if v in reads:
                found[v] = found[v].hull(box) if v in found else box
    return found
