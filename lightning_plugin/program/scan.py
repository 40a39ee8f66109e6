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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.ops import Kernel, ReduceOp, TileOp
from lightning_plugin.program.parts import parts_of, with_rest
from lightning_plugin.program.program import Program
from lightning_plugin.program.tape import See


@dataclass(frozen=True)
class ScanTile:
    """One tile of a scan; boxes of maps that the segment makes are by the serial of their node."""

    owned: tuple[Box, ...]
    reads: Mapping[int, Box]
    fresh: Mapping[int, Box]
    carried: Mapping[int, Box]
    kept: Mapping[int, Box]

    def held(self, serial: int) -> Box:
        """All of a map that is there while the tile lasts."""
        fresh, carried = self.fresh.get(serial), self.carried.get(serial)
        if fresh is None or fresh.empty:
            assert carried is not None
            return carried
        return fresh if carried is None else carried.hull(fresh)


def shareable(program: Program, grid: Grid) -> bool:
    """Whether a segment can run as a scan on a grid of more than one tile."""
    return grid.tiles > 1 and in_order(program, grid) > 1 and parts_in_order(program, grid)


def in_order(program: Program, grid: Grid) -> int:
    """The tiles of a scan on a grid; none where some operator needs rows in another order."""
    try:
        return len(scan(program, grid))
    except PlanError:
        return 0


def parts_in_order(program: Program, grid: Grid) -> bool:
    """Whether each part of a program that is scanned by itself can be, the program itself aside."""
    return all(part is program or in_order(part, grid) for part in scanned(program))


def scanned(program: Program) -> list[Program]:
    """The programs that a segment runs as scans, one after the other: each of its parts by itself, since what the tiles
    of a scan hand on is all of its program's. A part reads less than all parts together, so it may need rows in another
    order although all together do not."""
    return with_rest(program, parts_of(program))


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
            {id(v): needs.open[i][id(v)] for v in program.reads if id(v) in needs.open[i]},
            {serial: box for serial, row in rows.items() if (box := row.fresh[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.carried[i]) is not None},
            {serial: box for serial, row in rows.items() if (box := row.kept[i]) is not None},
        )
        for i, boxes in enumerate(tiles)
    )


@dataclass(frozen=True)
class Rows:
    """What each tile of a scan computes of one map, is handed and hands on, and what it needs for that of the maps that
    the node reads."""

    fresh: list[Box | None]
    carried: list[Box | None]
    kept: list[Box | None]
    wanted: list[tuple[Box, ...]]


class Needs:
    """What the tiles of a scan along an axis need, from its end back: ``open`` are, for each tile, the boxes of maps
    whose nodes were not looked at."""

    def __init__(self, axis: int, tiles: int) -> None:
        self.axis = axis
        self.open: list[dict[int, Box]] = [{} for _ in range(tiles)]

    def of(self, node: Node, owned: Sequence[Box] | None) -> Rows:
        """The rows of a node, after those of all that read what it makes; ``owned`` are the boxes that tiles own of it
        if it is a target."""
        if isinstance(node.op, ReduceOp):
            assert owned is not None
            nothing: list[Box | None] = [None] * len(owned)
            return Rows(nothing, nothing, nothing, [self.read(node, box, i) for i, box in enumerate(owned)])
        axis, done = self.axis, 0
        whole = [self.take(id(node.outputs[0]), i, owned) for i in range(len(self.open))]
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

    def take(self, key: int, tile: int, owned: Sequence[Box] | None) -> Box | None:
        """What a tile needs of a map: what it owns, and what is read of it."""
        read = self.open[tile].pop(key, None)
        if owned is None or owned[tile].empty:
            return read
        return owned[tile] if read is None else owned[tile].hull(read)

    def read(self, node: Node, rows: Box, tile: int) -> tuple[Box, ...]:
        """What a tile reads for some rows of a node's."""
        if rows.empty:
            return ()
        open_ = self.open[tile]
        boxes: tuple[Box, ...] = node.op.need(rows)  # type: ignore[attr-defined]
        for v, box in zip(node.maps, boxes, strict=True):
            open_[id(v)] = open_[id(v)].hull(box) if id(v) in open_ else box
        return boxes

    def handed_on(
        self, node: Node, whole: Sequence[Box | None], fresh: Sequence[Box | None]
    ) -> tuple[list[Box | None], list[Box | None]]:
        """What tiles are handed of a map, and what they keep: of what they hold, all from the first row that a later
        tile needs."""
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


def run_tile(
    program: Program,
    tile: ScanTile,
    carried: Mapping[int, Tensor],
    read: Callable[[Value, Box], Any],
    vectors: Mapping[int, Tensor],
    emit: Callable[[int, Box, Sequence[Tensor]], None],
    grad: bool,
    see: See | None = None,
) -> dict[int, Tensor]:
    """Evaluate one tile of a scan, as `Tape.run` does of a grid; returns what it hands on, by serial."""
    serial_of = {id(n.outputs[0]): n.serial for n in program.steps if not isinstance(n.op, ReduceOp)}
    boxes = {key: tile.reads.get(key) or tile.held(serial_of[key]) for key in held_keys(program, tile, serial_of)}
    held: dict[int, Tensor] = {id(v): read(v, tile.reads[id(v)]) for v in program.reads if id(v) in tile.reads}
    held.update({id(n.outputs[0]): carried[n.serial] for n in program.steps if n.serial in tile.carried})
    stored = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is not None}
    reducing = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is None}
    handed: dict[int, Tensor] = {}
    for place, node in enumerate(program.steps):
        if isinstance(node.op, ReduceOp):
            i = reducing[node.serial]
            if not tile.owned[i].empty:
                emit(i, tile.owned[i], Program.tiles(node, node.op.need(tile.owned[i]), held, boxes, grad))
        elif node.serial in tile.fresh or node.serial in tile.carried:
            out = node.outputs[0]
            whole = advance(program, node, tile, held, boxes, vectors, grad)
            if see is not None:
                see(node, whole, tile.owned)
            i = stored.get(node.serial, -1)
            if i >= 0 and not tile.owned[i].empty:
                with torch.set_grad_enabled(grad):
                    share = out.space.narrow(whole, boxes[id(out)], tile.owned[i])
                emit(i, tile.owned[i], [share])
                del share
            if node.serial in tile.kept:
                with torch.set_grad_enabled(grad):
                    part = out.space.narrow(whole, boxes[id(out)], tile.kept[node.serial])
                # Without grad a copy, or the rows that are handed on would hold the whole tile in memory.
                handed[node.serial] = part if grad else part.clone()
            held.pop(id(out), None)
            if program.last_use.get(id(out), -1) > place:
                held[id(out)] = whole
            del whole
        for v in node.inputs:
            if program.last_use.get(id(v)) == place:
                held.pop(id(v), None)
    return handed


def held_keys(program: Program, tile: ScanTile, serial_of: Mapping[int, int]) -> list[int]:
    made = [key for key, serial in serial_of.items() if serial in tile.fresh or serial in tile.carried]
    return [*tile.reads, *made]


def advance(
    program: Program,
    node: Node,
    tile: ScanTile,
    held: Mapping[int, Tensor],
    boxes: Mapping[int, Box],
    vectors: Mapping[int, Tensor],
    grad: bool,
) -> Tensor:
    """A node's fresh rows, behind those that were carried."""
    op, out = node.op, node.outputs[0]
    assert isinstance(op, TileOp)
    if node.serial not in tile.fresh:
        return held[id(out)]
    box = tile.fresh[node.serial]
    tiles = Program.tiles(node, op.need(box), held, boxes, grad)
    with torch.set_grad_enabled(grad and out.requires_grad):
        operands = [vectors[id(v)] for v in node.vectors]
        alone = node.serial not in tile.carried and boxes.get(id(node.maps[0])) == box
        if node.serial in program.overwrite and alone:
            fresh = op.in_place(node.inplace, tiles, operands)  # type: ignore[attr-defined]
        elif (unread := unread_kernel(program, node, tile) if grad else None) is not None:
            fresh = unread(tiles, operands)
        else:
            fresh = op.apply(box, tiles, operands)
        del tiles
        if node.serial not in tile.carried:
            return fresh
        return join(out.space, (held[id(out)], tile.carried[node.serial]), (fresh, box))


def unread_kernel(program: Program, node: Node, tile: ScanTile) -> Kernel | None:
    """What backward runs where nobody reads a node's fresh rows; see [Note: unread] in `rules.unread`."""
    if node.serial not in program.unread or node.serial in tile.kept or node.serial in tile.carried:
        return None
    assert isinstance(node.op, TileOp)
    return node.op.unread(tile.fresh[node.serial])


def join(layout: Layout, first: tuple[Tensor, Box], second: tuple[Tensor, Box]) -> Tensor:
    """Two neighbouring tiles as one."""
    (a, before), (b, after) = first, second
    axis = next(i for i, (x, y) in enumerate(zip(before.lo, after.lo, strict=True)) if x != y)
    factors = [f for dim in layout.dims for f in dim]
    dim = next(i for i, f in enumerate(factors) if isinstance(f, Axis) and f.index == axis)
    whole = torch.cat([layout.spread(a, before), layout.spread(b, after)], dim)
    return whole.reshape(layout.tile_shape(before.hull(after)))
