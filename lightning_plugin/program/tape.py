"""Tile programs: the operators of a tile of a segment as a flat list.

[Note: tapes] The computation of a tile depends on the sizes and the relative positions of its boxes, and on the `mark`
of each operator, the part of its position that matters (a window pads next to a border). Tiles that agree in all of
these are of one *kind*. A *tape* is the program of a kind: kernels in order, the part of each input that a kernel
reads, and the results that are freed after it.

A tape refers to maps and vectors by index and holds nothing of a recording, so that it runs for all recordings of the
same structure: see [Note: findings] in `findings`. Kernels whose operators have unkeyed fields (a key of random
numbers) are bound again for each recording.
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
from lightning_plugin.layout import Axis, Layout, Slicer
from lightning_plugin.ops import Kernel, Pieces, ReduceOp, TileOp
from lightning_plugin.program.key import has_unkeyed_fields
from lightning_plugin.program.program import Program

#: Reads a box of a map, as a tile or in pieces.
Read = Callable[[Value, Box], Tensor | Pieces]
Emit = Callable[[int, Box, Sequence[Tensor]], None]
#: Inspects the result of an operator on a tile that owns these boxes; see [Note: non-finite] in `execute.finite`.
Inspect = Callable[[Node, Tensor, Sequence[Box]], None]


@dataclass(frozen=True)
class ScanTile:
    """Tile of a scan; see [Note: scan] in `scan`.

    Attributes:
        owned: The boxes that it owns, one for each target.
        reads: Boxes of the maps that it reads.
        fresh: Boxes that it computes, by serial number of the node, as the two below.
        carried: Boxes that it gets from the tile before.
        kept: Boxes that it hands on.
    """

    owned: tuple[Box, ...]
    reads: Mapping[Value, Box]
    fresh: Mapping[int, Box]
    carried: Mapping[int, Box]
    kept: Mapping[int, Box]

    def held(self, serial: int) -> Box:
        """Return the box of a node's map that the tile holds: carried and fresh rows."""
        fresh, carried = self.fresh.get(serial), self.carried.get(serial)
        if fresh is None or fresh.empty:
            assert carried is not None
            return carried
        return fresh if carried is None else carried.hull(fresh)

    def boxes(self, program: Program) -> dict[Value, Box]:
        """Return the box that the tile holds of each map that it reads or makes."""
        there = self.fresh.keys() | self.carried.keys()
        made = {n.outputs[0]: self.held(n.serial) for n in program.nodes if n.serial in there}
        return {**self.reads, **made}


class Instruction(NamedTuple):
    """Instruction of a tape.

    Attributes:
        kernel: Computes the result; None emits the inputs as the target's.
        place: Index of the node in the program.
        inputs: Slots of maps, each with the part that is read; None is all of it.
        vectors: Slots of vectors.
        output: Slot of the result; -1 if no instruction reads it.
        grad: True if the result requires grad.
        target: Index of the target that the instruction emits; -1 if it emits none.
        share: The part of the result that the tile owns; None is all of it.
        drops: Slots that are freed after it.
        rebind_box: The box for which the kernel is bound in each recording; None if it is bound once.
        unread: Kernel of backward if no operator reads the result: see [Note: unread] in `rules.unread`.
    """

    kernel: Kernel | None
    place: int
    inputs: tuple[tuple[int, Slicer | None], ...]
    vectors: tuple[int, ...] = ()
    output: int = -1
    grad: bool = False
    target: int = -1
    share: Slicer | None = None
    drops: tuple[int, ...] = ()
    rebind_box: Box | None = None
    unread: Kernel | None = None

    def without_result(self, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Return the stand-in for an unread result, from the operator's inputs."""
        assert self.unread is not None
        tile = self.unread(tiles, [vectors[p] for p in self.vectors])
        return tile if self.share is None else self.share(tile)


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """Program of the tiles of a kind.

    Attributes:
        reads: Slots of the tiles that are read.
        slots: Number of slots.
        instructions: The instructions in order.
    """

    reads: tuple[int, ...]
    slots: int
    instructions: tuple[Instruction, ...]

    def rebound(self, program: Program) -> Tape:
        """Return the tape for another recording of the same structure."""
        if all(step.rebind_box is None for step in self.instructions):
            return self
        return replace(self, instructions=tuple(rebind_kernel(step, program) for step in self.instructions))

    def without_unread(self) -> tuple[Tape, dict[int, Instruction]]:
        """Return the tape with unread operators replaced by the emission of their inputs, and these operators'
        instructions by target."""
        unread = {step.target: step for step in self.instructions if step.unread is not None}
        steps = (step if step.unread is None else step._replace(kernel=None) for step in self.instructions)
        return replace(self, instructions=tuple(steps)), unread

    def run(
        self,
        read: list[Tensor | Pieces],
        owned: Sequence[Any],
        vectors: Sequence[Tensor],
        emit: Emit,
        grad: bool,
        inspect: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Evaluate a tile.

        Args:
            read: The tiles of ``reads``; the list is emptied.
            owned: The boxes that the tile owns, one for each target.
            vectors: The program's vectors.
            emit: Gets each target's index, box and tensors: its tile, or the inputs of a reduction.
            grad: True in backward.
            inspect: Gets the index of each node and its result.
        """
        held: list[Any] = [None] * self.slots
        for slot, tile in zip(self.reads, read, strict=True):
            held[slot] = tile
        read.clear()
        tile = None  # type: ignore[assignment]
        with torch.set_grad_enabled(grad):
            for kernel, place, inputs, places, output, wanted, target, share, drops, _, unread in self.instructions:
                tiles: list[Any] = [held[slot] if part is None else part(held[slot]) for slot, part in inputs]
                if kernel is None:
                    emit(target, owned[target], tiles)
                    del tiles
                else:
                    operands = [vectors[p] for p in places]
                    if grad and unread is not None and inspect is None:
                        tile = unread(tiles, operands)
                    elif grad and not wanted:
                        with torch.no_grad():
                            tile = kernel(tiles, operands)
                    else:
                        tile = kernel(tiles, operands)
                    del tiles
                    if inspect is not None:
                        inspect(place, tile)
                    if target >= 0:
                        part = [tile if share is None else share(tile)]
                        emit(target, owned[target], part)
                        del part
                    if output >= 0:
                        held[output] = tile
                    del tile
                for slot in drops:
                    held[slot] = None


def rebind_kernel(step: Instruction, program: Program) -> Instruction:
    """Bind the kernel of an instruction to the operator of a recording."""
    if step.rebind_box is None:
        return step
    op = program.nodes[step.place].op
    assert isinstance(op, TileOp)
    unread = None if step.unread is None else op.unread(step.rebind_box)
    return step._replace(kernel=op.kernel_for(step.rebind_box), unread=unread)


def make_tape(program: Program, owned: Sequence[Box], need: Mapping[Value, Box], scan: ScanTile | None = None) -> Tape:
    """Make the tape of a tile.

    The tape of a scan also reads carried rows, joins fresh rows to them, and emits kept rows as further targets.

    Args:
        program: The program.
        owned: The boxes that the tile owns, one for each target.
        need: The box that the tile holds of each map.
        scan: The tile, if it is one of a scan.
    """
    stored = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is not None}
    reducing = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is None}
    carried = {} if scan is None else scan.carried
    kept = {} if scan is None else {serial: i for i, serial in enumerate(scan.kept, len(program.targets))}
    slots, fresh_slot = program.map_slots, len(program.map_slots)
    instructions: list[Instruction] = []
    drops: tuple[int, ...] = ()

    def emit(i: int, inputs: tuple[tuple[int, Slicer | None], ...]) -> None:
        instructions.append(Instruction(None, place, inputs, target=i))

    for place, node in enumerate(program.nodes):
        serial, box = node.serial, None if isinstance(node.op, ReduceOp) else need.get(node.outputs[0])
        if isinstance(node.op, ReduceOp):
            i = reducing[serial]
            if not owned[i].empty:
                emit(i, input_parts(program, node, node.op.need(owned[i]), need))
        elif box is not None:  # else the tile needs nothing of its result
            assert isinstance(node.op, TileOp)
            out = node.outputs[0]
            fresh = box if scan is None else scan.fresh.get(serial)
            joins, slot = serial in carried, slots[out]
            i = stored.get(serial, -1)
            if i >= 0 and owned[i].empty:
                i = -1
            share = None if i < 0 else out.space.slicer(box, owned[i])
            lasts = program.last_use.get(out, -1) > place
            apart = joins or serial in kept  # the result is joined or emitted by instructions of their own
            if fresh is not None:
                overwrites = serial in program.in_place and not joins and need[node.maps[0]] == fresh
                unread = serial in program.unread and i >= 0 and not overwrites and not apart
                instructions.append(
                    Instruction(
                        node.op.writing(node.inplace) if overwrites else node.op.kernel_for(fresh),  # type: ignore[attr-defined]
                        place,
                        input_parts(program, node, node.op.need(fresh), need),
                        tuple(program.vector_slots[v] for v in node.vectors),
                        output=fresh_slot if joins else slot if lasts or apart else -1,
                        grad=out.requires_grad,
                        target=-1 if apart else i,
                        share=None if apart else share,
                        rebind_box=fresh if has_unkeyed_fields(node.op) and not overwrites else None,
                        unread=node.op.unread(fresh) if unread else None,
                    )
                )
                if joins:
                    join = partial(join_tiles, out.space, carried[serial], fresh)
                    both = (slot, None), (fresh_slot, None)
                    instructions.append(
                        Instruction(join, place, both, output=slot, grad=out.requires_grad, drops=(fresh_slot,))
                    )
            if apart:
                if i >= 0:
                    emit(i, ((slot, share),))
                if scan is not None and serial in kept:
                    emit(kept[serial], ((slot, out.space.slicer(box, scan.kept[serial])),))
                drops += () if lasts else (slot,)
        drops += tuple({slots[v] for v in node.inputs if program.last_use.get(v) == place and v in need})
        if instructions:
            instructions[-1] = instructions[-1]._replace(drops=(*instructions[-1].drops, *drops))
            drops = ()
    reads = [slots[v] for v in program.reads if v in need]
    reads += [slots[n.outputs[0]] for serial in carried for n in program.nodes if n.serial == serial]
    return Tape(tuple(reads), fresh_slot + 1, tuple(instructions))


def join_tiles(
    layout: Layout, before: Box, after: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor] = ()
) -> Tensor:
    """Concatenate two neighbouring tiles."""
    axis = next(i for i, (x, y) in enumerate(zip(before.lo, after.lo, strict=True)) if x != y)
    factors = [f for dim in layout.dims for f in dim]
    dim = next(i for i, f in enumerate(factors) if isinstance(f, Axis) and f.index == axis)
    whole = torch.cat([layout.unflatten_factors(t, box) for t, box in zip(tiles, (before, after), strict=True)], dim)
    return whole.reshape(layout.tile_shape(before.hull(after)))


def input_parts(
    program: Program, node: Node, wanted: Sequence[Box], need: Mapping[Value, Box]
) -> tuple[tuple[int, Slicer | None], ...]:
    return tuple((program.map_slots[v], v.space.slicer(need[v], box)) for v, box in zip(node.maps, wanted, strict=True))
