"""``halo="share"``: tiles in order along one axis, each handing rows it has computed to the next.

[Note: scan] Where halos are recomputed, neighbouring tiles both compute the rows between them. In a scan, every row of
every map inside a segment is computed once: a tile computes the rows that it needs and no earlier tile has computed
(they are *fresh*), and is handed the rest (*carried*). What later tiles will need of it, it hands on (*kept*)::

    fresh_i  = need_i minus what is done         held_i = carried_i joined with fresh_i
    kept_i   = held_i from the first row that a later tile needs        carried_{i+1} = kept_i

No rule knows of this: what an operator needs for its fresh rows is what its rule says of any box. A tile of backward
begins with what was carried in forward (so both directions use one grid), and what a tile hands on is one more result
of it, whose cotangent is the gradient of what the next one was handed: backward goes through the tiles in reverse.

Node by node from the end back, a node's rows are known in all tiles when those of all that read what it makes are: what
is done of it when a tile begins, and what tiles hand on, depends on nothing before it. So scans of programs that end at
the same place and are cut alike have these rows in common.

An operator that turns an axis round needs the last rows first: its segment cannot be a scan, and `scan` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp
from lightning_plugin.program.program import Program, parts_of
from lightning_plugin.program.tape import ScanTile


def shareable(program: Program, grid: Grid) -> bool:
    """True of a segment that can run as a scan on a grid of more than one tile."""
    return grid.tiles > 1 and in_order(program, grid) > 1 and parts_in_order(program, grid)


def in_order(program: Program, grid: Grid) -> int:
    """The tiles of a scan on a grid; none where some operator needs rows in another order."""
    try:
        return len(scan(program, grid))
    except PlanError:
        return 0


def parts_in_order(program: Program, grid: Grid) -> bool:
    """True if each part of a program that is scanned by itself can be, the program itself aside."""
    return all(part is program or in_order(part, grid) for part in scanned(program))


def scanned(program: Program) -> list[Program]:
    """The programs that a segment runs as scans, one after the other: each of its parts by itself, since what the tiles
    of a scan hand on is all of its program's. A part reads less than all parts together, so it may need rows in another
    order although all together do not."""
    parts = [*parts_of(program)]
    done = {t for part in parts for t in part.targets}
    rest = [t for t in program.targets if t not in done]  # requires no grad
    return [*parts, program.narrow(rest)] if rest else parts


def axis_of(grid: Grid) -> int:
    """The one axis along which a grid that shares halos may cut."""
    cut = [a for a, count in enumerate(grid.counts) if count > 1]
    if len(cut) > 1:
        raise PlanError(f"a segment that shares halos is cut along one axis, not on the grid {grid}")
    return cut[0] if cut else 0


def scan(program: Program, grid: Grid) -> tuple[ScanTile, ...]:
    """The tiles of a segment in order, with what each hands to the next."""
    tiles = tuple(program.owned(grid))
    owned = {t.node.serial: [boxes[i] for boxes in tiles] for i, t in enumerate(program.targets)}
    needs = Needs(axis_of(grid), len(tiles))
    rows = {node.serial: needs.of(node, owned.get(node.serial)) for node in reversed(program.steps)}
    return tuple(
        ScanTile(
            boxes,
            {v: needs.open[i][v] for v in program.reads if v in needs.open[i]},
            {serial: box for serial, row in rows.items() if (box := row.fresh[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.carried[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.kept[i]) is not None},
        )
        for i, boxes in enumerate(tiles)
    )


@dataclass(frozen=True)
class Rows:
    """Rows of one map that each tile of a scan computes, is handed and hands on, and those it needs of the maps that
    the node reads."""

    fresh: list[Box | None]
    carried: list[Box | None]
    kept: list[Box | None]
    wanted: list[tuple[Box, ...]]


class Needs:
    """Needs of the tiles of a scan along an axis, from its end back: ``open`` are, for each tile, the boxes of maps
    whose nodes were not looked at."""

    def __init__(self, axis: int, tiles: int) -> None:
        self.axis = axis
        self.open: list[dict[Value, Box]] = [{} for _ in range(tiles)]

    def of(self, node: Node, owned: Sequence[Box] | None) -> Rows:
        """The rows of a node, after those of all that read what it makes; ``owned`` are the boxes that tiles own of it
        if it is a target."""
        if isinstance(node.op, ReduceOp):
            assert owned is not None
            nothing: list[Box | None] = [None] * len(owned)
            return Rows(nothing, nothing, nothing, [self.read(node, box, i) for i, box in enumerate(owned)])
        axis, done = self.axis, 0
        whole = [self.take(node.outputs[0], i, owned) for i in range(len(self.open))]
        fresh: list[Box | None] = []
        for box in whole:
            rows = None if box is None else box.replace(axis, max(box.lo[axis], done), box.hi[axis])
            if rows is None or rows.empty:
                fresh.append(None)
            else:
                fresh.append(rows)
                done = rows.hi[axis]
        wanted = [() if rows is None else self.read(node, rows, i) for i, rows in enumerate(fresh)]
        return Rows(fresh, *self.handed_on(node, whole, fresh), wanted)

    def take(self, key: Value, tile: int, owned: Sequence[Box] | None) -> Box | None:
        """Rows that a tile needs of a map: those it owns, and those that are read."""
        read = self.open[tile].pop(key, None)
        if owned is None or owned[tile].empty:
            return read
        return owned[tile] if read is None else owned[tile].hull(read)

    def read(self, node: Node, rows: Box, tile: int) -> tuple[Box, ...]:
        """Boxes that a tile reads for some rows of a node's."""
        if rows.empty:
            return ()
        open_ = self.open[tile]
        boxes: tuple[Box, ...] = node.op.need(rows)  # type: ignore[attr-defined]
        for v, box in zip(node.maps, boxes, strict=True):
            open_[v] = open_[v].hull(box) if v in open_ else box
        return boxes

    def handed_on(
        self, node: Node, whole: Sequence[Box | None], fresh: Sequence[Box | None]
    ) -> tuple[list[Box | None], list[Box | None]]:
        """Rows of a map that tiles are handed, and that they keep: of those they hold, all from the first row that a
        later tile needs."""
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
                    raise not_in_order(node.label, box)
            else:
                held = joined(node, carried, rows, box)
                carried = None
                if row is not None and row < held.hi[axis]:
                    carried = held.replace(axis, max(held.lo[axis], row), held.hi[axis])
            kept.append(carried)
        return given, kept


def joined(node: Node, carried: Box | None, fresh: Box | None, whole: Box | None) -> Box:
    """The box of what is held; together the two parts must be one box that covers what is needed."""
    if fresh is None or carried is None:
        held = fresh or carried
        assert held is not None
    else:
        held = carried.hull(fresh)
        if held.positions != carried.positions + fresh.positions:
            raise not_in_order(node.label, fresh)
    if whole is not None and not held.contains(whole):
        raise not_in_order(node.label, whole)
    return held


def not_in_order(label: str, box: Box) -> PlanError:
    return PlanError(
        f"{label} needs {box} in another order than tiles are computed in, so its segment cannot share halos; "
        'use halo="recompute" for it'
    )
