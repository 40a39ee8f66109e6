"""Tile programs: the operators of a tile of a segment as a flat list.

[Note: tapes] What a tile evaluates depends on the sizes of its boxes, on how they lie to each other, and on what an
operator says of where they lie (its `mark`: a window pads next to a border); tiles that agree in all this are of one
*kind*. A *tape* is what the tiles of a kind do: kernels in order, the part of each input that an operator reads, and
when what was read is let go.

A tape speaks of maps and vectors by number and holds nothing of a recording, so that the next recording of the same
structure runs by it: see [Note: findings] in `findings`. Kernels whose operator holds what may be another thing then (a
key of random numbers) are bound anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Axis, Layout, Part
from lightning_plugin.ops import Kernel, Pieces, ReduceOp, TileOp
from lightning_plugin.program.key import varies
from lightning_plugin.program.program import Program

#: Reads a box of a map: a tile, or what gives it piece by piece.
Read = Callable[[Value, Box], Tensor | Pieces]
Emit = Callable[[int, Box, Sequence[Tensor]], None]
#: Looks at what an operator made of a tile, given what that owns of each target; see [Note: non-finite] in
#: `execute.finite`.
See = Callable[[Node, Tensor, Sequence[Box]], None]


@dataclass(frozen=True)
class ScanTile:
    """One tile of a scan; boxes of maps that the segment makes are by the serial of their node."""

    owned: tuple[Box, ...]
    reads: Mapping[Value, Box]
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

    def boxes(self, program: Program) -> dict[Value, Box]:
        """Boxes that the tile has of each map that it reads or makes."""
        there = self.fresh.keys() | self.carried.keys()
        made = {n.outputs[0]: self.held(n.serial) for n in program.steps if n.serial in there}
        return {**self.reads, **made}


class Step(NamedTuple):
    """One operator of a tape, the program's at a ``place``.

    ``inputs`` are slots of maps, with the part that is read; ``vectors`` places of vectors; ``output`` the slot of the
    result, or -1 where nobody reads it. ``target`` is the place of the target that it makes, or -1, and ``share`` the
    part of the result that is the tile's own; ``drops`` are let go after it. ``rebound`` is the box for which the
    kernel is bound in each recording, where it has to be. ``unread`` is what backward runs in the kernel's place, where
    nobody reads the result: see [Note: unread] in `rules.unread`.
    """

    kernel: Kernel | None
    place: int
    inputs: tuple[tuple[int, Part | None], ...]
    vectors: tuple[int, ...]
    output: int
    grad: bool
    target: int
    share: Part | None
    drops: tuple[int, ...]
    rebound: Box | None = None
    unread: Kernel | None = None

    def without_result(self, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Stand-in for the tile's own part of a result that nobody reads, given what the operator reads."""
        assert self.unread is not None
        tile = self.unread(tiles, [vectors[p] for p in self.vectors])
        return tile if self.share is None else self.share(tile)


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """Program of the tiles of a kind; ``reads`` are the slots that they begin with, of so many ``slots``."""

    reads: tuple[int, ...]
    slots: int
    steps: tuple[Step, ...]

    def bound(self, program: Program) -> Tape:
        """The tape for another recording of the same structure."""
        if all(step.rebound is None for step in self.steps):
            return self
        return replace(self, steps=tuple(bound(step, program) for step in self.steps))

    def parted(self) -> tuple[Tape, dict[int, Step]]:
        """The tape without the operators whose results nobody reads, which emits what they read; and these, by their
        targets."""
        unread = {step.target: step for step in self.steps if step.unread is not None}
        steps = (step if step.unread is None else step._replace(kernel=None) for step in self.steps)
        return replace(self, steps=tuple(steps)), unread

    def run(
        self,
        read: list[Tensor | Pieces],
        owned: Sequence[Any],
        vectors: Sequence[Tensor],
        emit: Emit,
        grad: bool,
        see: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Evaluate one tile, which begins with what was ``read``, and empties that list; ``emit(i, box, tiles)`` gets
        each target's share: its tile, or a reduction's inputs; ``see(place, tile)`` each operator's result."""
        held: list[Any] = [None] * self.slots
        for slot, tile in zip(self.reads, read, strict=True):
            held[slot] = tile
        read.clear()
        tile = None  # type: ignore[assignment]
        with torch.set_grad_enabled(grad):
            for kernel, place, inputs, places, output, wanted, target, share, drops, _, unread in self.steps:
                tiles: list[Any] = [held[slot] if part is None else part(held[slot]) for slot, part in inputs]
                if kernel is None:
                    emit(target, owned[target], tiles)
                    del tiles
                else:
                    operands = [vectors[p] for p in places]
                    if grad and unread is not None and see is None:
                        tile = unread(tiles, operands)
                    elif grad and not wanted:
                        with torch.no_grad():
                            tile = kernel(tiles, operands)
                    else:
                        tile = kernel(tiles, operands)
                    del tiles
                    if see is not None:
                        see(place, tile)
                    if target >= 0:
                        mine = [tile if share is None else share(tile)]
                        emit(target, owned[target], mine)
                        del mine
                    if output >= 0:
                        held[output] = tile
                    del tile
                for slot in drops:
                    held[slot] = None


def bound(step: Step, program: Program) -> Step:
    """A step with its kernel bound to the operator of a recording."""
    if step.rebound is None:
        return step
    op = program.steps[step.place].op
    assert isinstance(op, TileOp)
    unread = None if step.unread is None else op.unread(step.rebound)
    return step._replace(kernel=op.bound(step.rebound), unread=unread)


def record(program: Program, owned: Sequence[Box], need: Mapping[Value, Box], scan: ScanTile | None = None) -> Tape:
    """The tape of a tile, of which ``need`` is all that is held of each map.

    The tape of a ``scan`` begins with the rows that it was handed, too. It joins fresh rows to these, and emits what it
    hands on as further targets.
    """
    stored = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is not None}
    reducing = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is None}
    carried = {} if scan is None else scan.carried
    kept = {} if scan is None else {serial: i for i, serial in enumerate(scan.kept, len(program.targets))}
    slots, spare = program.slots, len(program.slots)
    steps: list[Step] = []
    drops: tuple[int, ...] = ()

    def send(i: int, inputs: tuple[tuple[int, Part | None], ...]) -> None:
        steps.append(Step(None, place, inputs, (), -1, False, i, None, ()))

    for place, node in enumerate(program.steps):
        serial, box = node.serial, None if isinstance(node.op, ReduceOp) else need.get(node.outputs[0])
        if isinstance(node.op, ReduceOp):
            i = reducing[serial]
            if not owned[i].empty:
                send(i, parts(program, node, node.op.need(owned[i]), need))
        elif box is not None:  # else the tile has no share in what comes of it
            assert isinstance(node.op, TileOp)
            out = node.outputs[0]
            fresh = box if scan is None else scan.fresh.get(serial)
            joins, slot = serial in carried, slots[out]
            i = stored.get(serial, -1)
            if i >= 0 and owned[i].empty:
                i = -1
            share = None if i < 0 else out.space.part(box, owned[i])
            lasts = program.last_use.get(out, -1) > place
            apart = joins or serial in kept  # what becomes of the result is told by steps of their own
            if fresh is not None:
                overwrites = serial in program.overwrite and not joins and need[node.maps[0]] == fresh
                unread = serial in program.unread and i >= 0 and not overwrites and not apart
                steps.append(
                    Step(
                        node.op.writing(node.inplace) if overwrites else node.op.bound(fresh),  # type: ignore[attr-defined]
                        place,
                        parts(program, node, node.op.need(fresh), need),
                        tuple(program.places[v] for v in node.vectors),
                        spare if joins else slot if lasts or apart else -1,
                        out.requires_grad,
                        -1 if apart else i,
                        None if apart else share,
                        (),
                        fresh if varies(node.op) and not overwrites else None,
                        node.op.unread(fresh) if unread else None,
                    )
                )
                if joins:
                    join = partial(joined, out.space, carried[serial], fresh)
                    both = (slot, None), (spare, None)
                    steps.append(Step(join, place, both, (), slot, out.requires_grad, -1, None, (spare,)))
            if apart:
                if i >= 0:
                    send(i, ((slot, share),))
                if scan is not None and serial in kept:
                    send(kept[serial], ((slot, out.space.part(box, scan.kept[serial])),))
                drops += () if lasts else (slot,)
        drops += tuple({slots[v] for v in node.inputs if program.last_use.get(v) == place and v in need})
        if steps:
            steps[-1] = steps[-1]._replace(drops=(*steps[-1].drops, *drops))
            drops = ()
    reads = [slots[v] for v in program.reads if v in need]
    reads += [slots[n.outputs[0]] for serial in carried for n in program.steps if n.serial == serial]
    return Tape(tuple(reads), spare + 1, tuple(steps))


def joined(layout: Layout, before: Box, after: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor] = ()) -> Tensor:
    """Two neighbouring tiles as one."""
    axis = next(i for i, (x, y) in enumerate(zip(before.lo, after.lo, strict=True)) if x != y)
    factors = [f for dim in layout.dims for f in dim]
    dim = next(i for i, f in enumerate(factors) if isinstance(f, Axis) and f.index == axis)
    whole = torch.cat([layout.spread(t, box) for t, box in zip(tiles, (before, after), strict=True)], dim)
    return whole.reshape(layout.tile_shape(before.hull(after)))


def parts(
    program: Program, node: Node, wanted: Sequence[Box], need: Mapping[Value, Box]
) -> tuple[tuple[int, Part | None], ...]:
    return tuple((program.slots[v], v.space.part(need[v], box)) for v, box in zip(node.maps, wanted, strict=True))
