"""What the tiles of a segment compute, found once for all that are the same computation.

[Note: tapes] What a tile evaluates depends on the sizes of its boxes, on how they lie to each other, and on what an
operator says of where they lie (its `mark`: a window pads next to a border); tiles that agree in all this are of one
*kind*. A *tape* is what the tiles of a kind do: kernels in order, the part of each input that an operator reads, and
when what was read is let go. What a box is on one axis depends on nothing but the tile's index there, and so does its
part in the kind: boxes are found for one tile of each index and put together for all others, and a grid of n × n tiles
asks the operators n times. Where an axis has another say (a tile without a share in some target), each tile has a tape
of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Part
from lightning_plugin.ops import Kernel, ReduceOp, TileOp
from lightning_plugin.program.program import Program

Read = Callable[[Value, Box], Tensor]
Emit = Callable[[int, Box, Sequence[Tensor]], None]
Interval = tuple[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operator of a tape. ``inputs`` are keys of what is held, with the part that is read; ``target`` is the place
    of the target that it makes, or -1, and ``share`` the part of the result that is the tile's own; ``drops`` are let
    go after it."""

    kernel: Kernel | None
    inputs: tuple[tuple[int, Part | None], ...]
    vectors: tuple[int, ...]
    output: int | None
    grad: bool
    target: int
    share: Part | None
    drops: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """What the tiles of a kind do; ``reads`` are what they begin with."""

    reads: tuple[Value, ...]
    steps: tuple[Step, ...]

    def run(
        self, owned: Sequence[Box], boxes: Mapping[int, Box], read: Read, vectors: Mapping[int, Tensor], emit: Emit,
        grad: bool,
    ) -> None:  # fmt: skip
        """Evaluate one tile; ``emit(i, box, tiles)`` gets each target's share: its tile, or a reduction's inputs."""
        held = {id(v): read(v, boxes[id(v)]) for v in self.reads}
        with torch.set_grad_enabled(grad):
            for step in self.steps:
                tiles = [held[key] if part is None else part(held[key]) for key, part in step.inputs]
                if step.kernel is None:
                    emit(step.target, owned[step.target], tiles)
                    del tiles
                else:
                    operands = [vectors[key] for key in step.vectors]
                    if grad and not step.grad:
                        with torch.no_grad():
                            tile = step.kernel(tiles, operands)
                    else:
                        tile = step.kernel(tiles, operands)
                    del tiles
                    if step.target >= 0:
                        share = tile if step.share is None else step.share(tile)
                        emit(step.target, owned[step.target], [share])
                        del share
                    if step.output is not None:
                        held[step.output] = tile
                    del tile
                for key in step.drops:
                    held.pop(key, None)


def record(program: Program, owned: Sequence[Box], need: Mapping[int, Box]) -> Tape:
    """The tape of a tile."""
    stored = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is not None}
    reducing = {t.node.serial: i for i, t in enumerate(program.targets) if t.stored is None}
    steps = []
    drops: tuple[int, ...] = ()
    for place, node in enumerate(program.steps):
        drops += tuple({id(v) for v in node.inputs if program.last_use.get(id(v)) == place and id(v) in need})
        if isinstance(node.op, ReduceOp):
            i = reducing[node.serial]
            if not owned[i].empty:
                inputs = parts(node, node.op.need(owned[i]), need)
                steps.append(Step(None, inputs, (), None, False, i, None, drops))
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
                parts(node, node.op.need(box), need),
                tuple(id(v) for v in node.vectors),
                id(out) if kept else None,
                out.requires_grad,
                i,
                None if i < 0 else out.space.part(box, owned[i]),
                drops,
            )
        )
        drops = ()
    return Tape(tuple(v for v in program.reads if id(v) in need), tuple(steps))


def parts(node: Node, wanted: Sequence[Box], need: Mapping[int, Box]) -> tuple[tuple[int, Part | None], ...]:
    return tuple((id(v), v.space.part(need[id(v)], box)) for v, box in zip(node.maps, wanted, strict=True))


@dataclass(frozen=True, eq=False)
class Line:
    """One index of a grid on one axis: every map's interval there, and what the index adds to a tile's kind."""

    held: Mapping[int, Interval]
    kind: int


class Tapes:
    """The tapes of a program on a grid."""

    def __init__(self, program: Program, grid: Grid) -> None:
        self.program = program
        self.grid = grid
        self.counts = grid.counts
        self.ends = grid.ends([t.map.space.extent for t in program.targets])
        self.lines: dict[tuple[int, int], Line] = {}
        self.kinds: dict[Hashable, int] = {}
        self.tapes: dict[tuple[int, ...], Tape] = {}
        self.regular = self.is_regular()
        self.places = [{lo: i for i, lo in enumerate(cuts)} for cuts in self.ends[0]]

    def is_regular(self) -> bool:
        """Whether all maps have the axes of the grid, and every tile a share in every target."""
        maps = [v for n in self.program.steps for v in (*n.maps, *(o for o in n.outputs if o.is_map))]
        return all(len(v.space.extent) == len(self.counts) for v in maps) and all(
            all(a < b for a, b in itertools.pairwise(cuts)) for axes in self.ends for cuts in axes
        )

    def fresh(self, owned: Sequence[Box]) -> bool:
        """Whether no tile of this one's kind has been evaluated."""
        return not self.regular or tuple(line.kind for line in self.across(owned)) not in self.tapes

    def run(self, owned: Sequence[Box], read: Read, vectors: Mapping[int, Tensor], emit: Emit, grad: bool) -> None:
        """Evaluate a tile; see `Tape.run`."""
        if not self.regular:
            need = self.program.boxes(owned)
            record(self.program, owned, need).run(owned, need, read, vectors, emit, grad)
            return
        lines = self.across(owned)
        kind = tuple(line.kind for line in lines)
        tape = self.tapes.get(kind)
        if tape is None:
            tape = self.tapes[kind] = record(self.program, owned, self.program.boxes(owned))
        boxes = {id(v): Box.of(line.held[id(v)] for line in lines) for v in tape.reads}
        tape.run(owned, boxes, read, vectors, emit, grad)

    def across(self, owned: Sequence[Box]) -> list[Line]:
        """A tile's index on every axis."""
        return [self.line(axis, self.places[axis][lo]) for axis, lo in enumerate(owned[0].lo)]

    def line(self, axis: int, index: int) -> Line:
        found = self.lines.get((axis, index))
        if found is None:
            self.look(index)
            found = self.lines[axis, index]
        return found

    def look(self, index: int) -> None:
        """Find the boxes of the tile that has an index on every axis, or the last where there are fewer."""
        place = tuple(min(index, count - 1) for count in self.counts)
        owned = Grid.owned(self.ends, place)
        need = self.program.boxes(owned)
        for axis, i in enumerate(place):
            held = {key: (box.lo[axis], box.hi[axis]) for key, box in need.items()}
            kind = tuple(self.lying(axis, owned, need))
            self.lines[axis, i] = Line(held, self.kinds.setdefault(kind, len(self.kinds)))

    def lying(self, axis: int, owned: Sequence[Box], need: Mapping[int, Box]) -> Sequence[Hashable]:
        """How the boxes of a tile lie to each other on an axis, and what operators mark there."""
        found: list[Hashable] = []
        reducing = {t.node.serial: box for t, box in zip(self.program.targets, owned, strict=True) if t.stored is None}

        def add(v: Value, box: Box) -> None:
            here = need[id(v)]
            found.append((here.hi[axis] - here.lo[axis], box.lo[axis] - here.lo[axis], box.hi[axis] - box.lo[axis]))

        for node in self.program.steps:
            out = reducing.get(node.serial) or need.get(id(node.outputs[0]))
            if out is None:
                found.append(None)
                continue
            for v, wanted in zip(node.maps, node.op.need(out), strict=True):  # type: ignore[attr-defined]
                add(v, wanted)
            if isinstance(node.op, TileOp):
                found.append((out.hi[axis] - out.lo[axis], node.op.mark(axis, out.lo[axis], out.hi[axis])))
        for t, box in zip(self.program.targets, owned, strict=True):
            if t.stored is not None:
                add(t.stored, box)
        return found
