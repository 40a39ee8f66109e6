"""``halo="share"``: tiles in order along one axis, each handing computed rows to the next.

[Note: scan] If halos are recomputed, neighbouring tiles both compute the rows between them. In a scan, every row of
every map inside a segment is computed once. Of the rows that a tile needs, it computes those that no earlier tile has
computed (*fresh*), and gets the others from the tile before (*carried*). It hands on the rows that later tiles need
(*kept*)::

    fresh_i  = need_i minus rows of earlier tiles        held_i = carried_i joined with fresh_i
    kept_i   = held_i from the first row that a later tile needs        carried_{i+1} = kept_i

Rules are the same as on any grid: the inputs of fresh rows are those of any box. A tile of backward begins with the
rows that it got in forward, so both directions have one grid. Kept rows are results of a tile; their cotangent is the
gradient of the next tile's carried rows, so backward runs through the tiles in reverse.

The rows of a node are found from the last node back, when those of all its readers are known. They depend on later
nodes and on the cuts alone, so scans of programs with the same end and the same cuts have these rows in common.

An operator that flips an axis needs the last rows first. Its segment cannot be a scan: `scan_tiles` raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.program.program import Program
from lightning_plugin.program.tape import ScanTile


def can_share_halos(program: Program, grid: Grid) -> bool:
    """True for a segment that can run as a scan, on a grid of more than one tile."""
    return grid.tiles > 1 and scan_length(program, grid) > 1 and can_scan_parts(program, grid)


def scan_length(program: Program, grid: Grid) -> int:
    """Return the number of tiles of a scan on a grid; 0 if an operator needs rows in another order."""
    try:
        return len(scan_tiles(program, grid))
    except PlanError:
        return 0


def can_scan_parts(program: Program, grid: Grid) -> bool:
    """True if each part of a program that runs as a scan of its own can be one; the whole program is not tested."""
    return all(part is program or scan_length(part, grid) for part in scan_programs(program))


def scan_programs(program: Program) -> list[Program]:
    """Return the programs that a segment runs as scans, one after the other: its parts, and the targets without
    gradient.

    A part has a scan of its own, since backward needs its carried rows. It reads less than all parts together, so it
    may need rows in another order even if the whole program does not.
    """
    parts = [*program.parts]
    done = {t for part in parts for t in part.targets}
    rest = [t for t in program.targets if t not in done]  # they require no grad
    return [*parts, program.narrow(rest)] if rest else parts


def scan_axis(grid: Grid) -> int:
    """Return the one axis along which a grid cuts; a scan has no other."""
    cut = [a for a, count in enumerate(grid.counts) if count > 1]
    if len(cut) > 1:
        raise PlanError(f"a segment that shares halos is cut along one axis, not on the grid {grid}")
    return cut[0] if cut else 0


def scan_tiles(program: Program, grid: Grid) -> tuple[ScanTile, ...]:
    """Return the tiles of a segment in order, with the rows that each hands to the next."""
    tiles = tuple(program.owned(grid))
    owned = {t.node.serial: [boxes[i] for boxes in tiles] for i, t in enumerate(program.targets)}
    needs = ScanNeeds(scan_axis(grid), len(tiles))
    rows = {node.serial: needs.rows_of(node, owned.get(node.serial)) for node in reversed(program.nodes)}
    return tuple(
        ScanTile(
            boxes,
            {v: needs.pending[i][v] for v in program.reads if v in needs.pending[i]},
            {serial: box for serial, row in rows.items() if (box := row.fresh[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.carried[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.kept[i]) is not None},
        )
        for i, boxes in enumerate(tiles)
    )


@dataclass(frozen=True)
class Rows:
    """Rows of a node in each tile of a scan.

    Attributes:
        fresh: Rows that the tile computes.
        carried: Rows that it gets from the tile before.
        kept: Rows that it hands on.
        wanted: Boxes of the node's inputs that the fresh rows need.
    """

    fresh: list[Box | None]
    carried: list[Box | None]
    kept: list[Box | None]
    wanted: list[tuple[Box, ...]]


class ScanNeeds:
    """Needs of the tiles of a scan along an axis, from the last node back.

    Attributes:
        axis: The axis of the scan.
        pending: For each tile, its boxes of maps whose nodes are not visited yet.
    """

    def __init__(self, axis: int, tiles: int) -> None:
        self.axis = axis
        self.pending: list[dict[Value, Box]] = [{} for _ in range(tiles)]

    def rows_of(self, node: Node, owned: Sequence[Box] | None) -> Rows:
        """Find the rows of a node, after those of all its readers; ``owned`` are the tiles' boxes if it is a target."""
        if isinstance(node.op, ReduceOp):
            assert owned is not None
            nothing: list[Box | None] = [None] * len(owned)
            return Rows(nothing, nothing, nothing, [self.add_inputs(node, box, i) for i, box in enumerate(owned)])
        axis, done = self.axis, 0
        whole = [self.pop_rows(node.outputs[0], i, owned) for i in range(len(self.pending))]
        fresh: list[Box | None] = []
        for box in whole:
            rows = None if box is None else box.replace(axis, max(box.lo[axis], done), box.hi[axis])
            if rows is None or rows.empty:
                fresh.append(None)
            else:
                fresh.append(rows)
                done = rows.hi[axis]
        wanted = [() if rows is None else self.add_inputs(node, rows, i) for i, rows in enumerate(fresh)]
        return Rows(fresh, *self.handed_on(node, whole, fresh), wanted)

    def pop_rows(self, key: Value, tile: int, owned: Sequence[Box] | None) -> Box | None:
        """Remove and return the box that a tile needs of a map: the hull of what it owns and of what is read."""
        read = self.pending[tile].pop(key, None)
        if owned is None or owned[tile].empty:
            return read
        return owned[tile] if read is None else owned[tile].hull(read)

    def add_inputs(self, node: Node, rows: Box, tile: int) -> tuple[Box, ...]:
        """Add and return the boxes that a tile reads for some rows of a node."""
        if rows.empty:
            return ()
        pending = self.pending[tile]
        boxes: tuple[Box, ...] = node.op.need(rows)  # type: ignore[attr-defined]
        for v, box in zip(node.maps, boxes, strict=True):
            pending[v] = pending[v].hull(box) if v in pending else box
        return boxes

    def handed_on(
        self, node: Node, whole: Sequence[Box | None], fresh: Sequence[Box | None]
    ) -> tuple[list[Box | None], list[Box | None]]:
        """Return the carried and the kept rows of each tile: kept are all held rows from the first that a later tile
        needs."""
        axis = self.axis
        later: list[int | None] = []
        first: int | None = None
        for box in reversed(whole):
            later.append(first)
            if box is not None:
                first = box.lo[axis] if first is None else min(first, box.lo[axis])
        given: list[Box | None] = []
        kept: list[Box | None] = []
        carried: Box | None = None
        for box, rows, row in zip(whole, fresh, reversed(later), strict=True):
            given.append(carried)
            if carried is None and rows is None:
                if box is not None:
                    raise order_error(node.label, box)
            else:
                held = held_box(node, carried, rows, box)
                carried = None
                if row is not None and row < held.hi[axis]:
                    carried = held.replace(axis, max(held.lo[axis], row), held.hi[axis])
            kept.append(carried)
        return given, kept


def held_box(node: Node, carried: Box | None, fresh: Box | None, whole: Box | None) -> Box:
    """Return the box of carried and fresh rows, which must be one box that covers the needed one."""
    if fresh is None or carried is None:
        held = fresh or carried
        assert held is not None
    else:
        held = carried.hull(fresh)
        if held.positions != carried.positions + fresh.positions:
            raise order_error(node.label, fresh)
    if whole is not None and not held.contains(whole):
        raise order_error(node.label, whole)
    return held


def order_error(label: str, box: Box) -> PlanError:
    return PlanError(
        f"{label} needs {box} in another order than tiles are computed in, so its segment cannot share halos; "
        'use halo="recompute" for it'
    )
