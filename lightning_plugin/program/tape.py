"""What a tile of a segment computes, as a flat list.

[Note: tapes] What a tile evaluates depends on the sizes of its boxes, on how they lie to each other, and on what an
operator says of where they lie (its `mark`: a window pads next to a border); tiles that agree in all this are of one
*kind*. A *tape* is what the tiles of a kind do: kernels in order, the part of each input that an operator reads, and
when what was read is let go. What a box is on one axis depends on nothing but the tile's index there, and so does its
part in the kind: boxes are found for one tile of each index and put together for all others, and a grid of n × n tiles
asks the operators n times. Where an axis has another say (a tile without a share in some target), each tile has a tape
of its own.

A tape speaks of maps and vectors by number and holds nothing of a recording, so that the next recording of the same
structure runs by it: see [Note: findings] in `findings`. Kernels whose operator holds what may be another thing then (a
key of random numbers) are bound anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Part
from lightning_plugin.ops import Kernel, Pieces, ReduceOp, TileOp
from lightning_plugin.program.program import Program
from lightning_plugin.program.structure import varies

#: Reads a box of a map: a tile, or what gives it piece by piece.
Read = Callable[[Value, Box], Tensor | Pieces]
Emit = Callable[[int, Box, Sequence[Tensor]], None]
#: Looks at what an operator made of a tile, given what that owns of each target; see [Note: lost] in `execute.finite`.
See = Callable[[Node, Tensor, Sequence[Box]], None]


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
        """What stands for the tile's own part of a result that nobody reads, given what the operator reads."""
        assert self.unread is not None
        tile = self.unread(tiles, [vectors[p] for p in self.vectors])
        return tile if self.share is None else self.share(tile)


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """What the tiles of a kind do; ``reads`` are the slots that they begin with, of so many ``slots``."""

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


def record(program: Program, owned: Sequence[Box], need: Mapping[int, Box]) -> Tape:
    """The tape of a tile."""
    stored = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is not None}
    reducing = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is None}
    slots = program.slots
    steps = []
    drops: tuple[int, ...] = ()
    for place, node in enumerate(program.steps):
        drops += tuple({slots[id(v)] for v in node.inputs if program.last_use.get(id(v)) == place and id(v) in need})
        if isinstance(node.op, ReduceOp):
            i = reducing[node.serial]
            if not owned[i].empty:
                inputs = parts(program, node, node.op.need(owned[i]), need)
                steps.append(Step(None, place, inputs, (), -1, False, i, None, drops))
                drops = ()
            continue
        out = node.outputs[0]
        box = need.get(id(out))
        if box is None:  # the tile has no share in what comes of it
            continue
        assert isinstance(node.op, TileOp)
        overwrites = node.serial in program.overwrite and need[id(node.maps[0])] == box
        i = stored.get(node.serial, -1)
        if i >= 0 and owned[i].empty:
            i = -1
        kept = program.last_use.get(id(out), -1) > place
        steps.append(
            Step(
                node.op.writing(node.inplace) if overwrites else node.op.bound(box),  # type: ignore[attr-defined]
                place,
                parts(program, node, node.op.need(box), need),
                tuple(program.places[id(v)] for v in node.vectors),
                slots[id(out)] if kept else -1,
                out.requires_grad,
                i,
                None if i < 0 else out.space.part(box, owned[i]),
                drops,
                box if varies(node.op) and not overwrites else None,
                node.op.unread(box) if node.serial in program.unread and i >= 0 and not overwrites else None,
            )
        )
        drops = ()
    reads = tuple(slots[id(v)] for v in program.reads if id(v) in need)
    return Tape(reads, len(slots), tuple(steps))


def parts(
    program: Program, node: Node, wanted: Sequence[Box], need: Mapping[int, Box]
) -> tuple[tuple[int, Part | None], ...]:
    return tuple(
        (program.slots[id(v)], v.space.part(need[id(v)], box)) for v, box in zip(node.maps, wanted, strict=True)
    )
