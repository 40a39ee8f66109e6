"""Forward of a segment: every tile without grad; stored maps are written, reductions merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.alike import Owned
from lightning_plugin.execute.segment import SegmentRun, outline, read_from
from lightning_plugin.graph import Value
from lightning_plugin.ops import Pieces, Reduction
from lightning_plugin.program.scan import run_tile, scan
from lightning_plugin.progress import ranged
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.team import Team


class Forward:
    """One forward pass of a segment over all tiles; ``stored`` are the boundaries that it reads and makes."""

    def __init__(self, run: SegmentRun, inputs: Sequence[Tensor], stored: Mapping[Value, Boundary]) -> None:
        program = run.program
        self.stored = stored
        self.segment = run
        self.inputs = inputs
        self.vectors = {v: t.detach() for v, t in zip(program.vectors, inputs, strict=False)}
        self.spreads = {v: t.detach() for v, t in zip(run.spreads, inputs[len(program.vectors) :], strict=False)}
        self.tapes = run.tapes(program, run.plan.forward)
        self.operands = [self.vectors[v] for v in program.vectors]
        self.watched = True
        self.totals: dict[int, Reduction] = {}
        #: How many tiles of stored maps were evaluated.
        self.evaluated = 0
        #: What each tile of a scan was handed: backward begins with it.
        self.carried: list[dict[int, Tensor]] = []
        #: What each piece of this rank's work made, until the ranks exchange it; see [Note: team] in `team`.
        self.made: list[Made] = []

    def run(self) -> list[Tensor]:
        """The reduced vectors, in the order of the targets; stored maps are where their handles say."""
        run = self.segment
        where = [read_from(v, self.handle(v)) for v in run.program.reads]
        likeness = run.likeness(self.tapes, self.inputs, where, "forward")
        with run.counted(self.tapes, likeness) as known, run.at.queue.pooling():
            if known and run.rehearsal is not None:
                return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in run.outputs]
            self.watched = not known
            if run.scans:
                self.scan()
            else:
                self.grid()
            for v in (*run.stored, *run.boundaries):
                self.stored[v].rest()
        results: list[Tensor] = []
        for i, target in enumerate(run.program.targets):
            if target.stored is None:
                results.extend(target.finish(self.totals[i], self.vectors))
        return results

    @property
    def handles(self) -> dict[Value, Boundary]:
        """The boundaries that are read."""
        return {v: self.stored[v] for v in self.segment.boundaries}

    def handle(self, v: Value) -> Boundary | None:
        """Where a boundary that is read lies."""
        return self.stored.get(v)

    def expect(self, outlined: Callable[[], Sequence[tuple[Mapping[Value, Box], Owned]]]) -> None:
        targets = enumerate(self.segment.program.targets)
        written = {i: self.stored[t.stored] for i, t in targets if t.stored is not None}
        self.segment.expect(outlined, self.handles, written)

    def grid(self) -> None:
        run = self.segment
        self.expect(lambda: outline(run.program, run.plan.forward))
        if run.team is not None:
            self.together(run.team)
            return
        for members in run.loop(self.tapes, self.handle, run.fetch(self.handles)):
            with run.watching(self.watched and run.watch(self.tapes, members[0])), ranged("tile"):
                self.tile(members)

    def read(self, v: Value, box: Box) -> Tensor | Pieces:
        return self.segment.read(v, box, self.spreads, self.handle(v))

    def scan(self) -> None:
        program = self.segment.program
        handed: dict[int, Tensor] = {}

        tiles = scan(program, self.segment.plan.forward)
        self.expect(lambda: [(tile.reads, tile.owned) for tile in tiles])
        for ((number, tile),) in self.segment.step.told([pair] for pair in enumerate(tiles)):
            if self.segment.trains:
                self.carried.append(handed)
            near = self.segment.near(tile.reads)

            def emit(i: int, box: Box, tiles: Sequence[Tensor], near: bool = near) -> None:
                self.emit(i, [box], tiles)
                self.note(i, [box], tiles[0], near)

            with self.segment.watching(), ranged("tile"):
                tape = self.tapes.of_scan(number, tile)
                handed = run_tile(
                    tape, program, tile, handed, self.read, self.operands, emit, grad=False, see=self.segment.see
                )

    def tile(self, members: Sequence[Owned]) -> None:
        """Evaluate a tile once, for all that are identical to it."""
        near = self.near(members[0])

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            boxes = [member[i] for member in members]
            self.emit(i, boxes, tiles)
            if self.segment.team is None:
                self.note(i, boxes, tiles[0], near)

        if self.segment.team is not None:
            self.made.append(Made())
        self.tapes.run(members[0], self.read, self.operands, emit, grad=False)

    def emit(self, i: int, boxes: Sequence[Box], tiles: Sequence[Tensor]) -> None:
        """A tile's share of a target, of a reduction as often as there are identical tiles."""
        target = self.segment.program.targets[i]
        if target.stored is not None:
            self.stored[target.stored].write(boxes, tiles[0], self.segment.plan.ahead)
            return
        part = target.part(boxes[0], tiles, self.vectors, len(boxes))
        if self.segment.team is not None:
            self.made[-1].parts[i] = part
        else:
            self.merge(i, part)

    def near(self, owned: Owned) -> bool:
        """Whether something that a tile reads is background in part."""
        return bool(self.segment.known) and self.segment.near(self.tapes.boxes(owned))

    def note(self, i: int, boxes: Sequence[Box], tile: Tensor, near: bool) -> None:
        """Note where a stored map is constant that one tile was written to; it may be so where that is ``near``
        background. A rehearsal looks too, so that memory is there for it."""
        v = self.segment.program.targets[i].stored
        if v is None:
            return
        constants, made = self.stored[v].constants, self.stored[v].made
        if made is not None:
            made.number(boxes, self.evaluated)
        self.evaluated += 1
        if constants is None:
            return
        key = constants.compare(v.space, tile, boxes[0]) if near else None
        for box in boxes[1:] if near else boxes:
            if near and key is None:
                constants.compare(v.space, tile, box)
            else:
                constants.note(box, key)

    def merge(self, i: int, part: Reduction) -> None:
        op = self.segment.program.targets[i].op
        self.totals[i] = op.merge(self.totals[i], part) if i in self.totals else part

    # Several ranks

    def together(self, team: Team) -> None:
        """This rank's tiles, and from time to time what the other ranks have made of theirs."""
        run = self.segment
        for dealt in team.rounds(run.work(self.tapes, self.handle)):
            mine = (members for owner, members in dealt if owner == team.rank)
            for members in run.step.told(run.announced(self.tapes, mine, run.fetch(self.handles))):
                with run.watching():
                    self.tile(members)
            made = [iter(rank) for rank in team.gather([m.on("cpu") for m in self.made])]
            self.made.clear()
            for owner, members in dealt:
                self.receive(team, owner, members, next(made[owner]))

    def receive(self, team: Team, owner: int, members: Sequence[Owned], made: Made) -> None:
        """Take what a rank has made of a tile: in the order of the grid, so that all ranks add in the same order."""
        for i, part in made.on(team.device).parts.items():
            self.merge(i, part)
        for i, target in enumerate(self.segment.program.targets):
            handle = None if target.stored is None else self.stored[target.stored]
            box = members[0][i]
            if handle is None or box.empty:
                continue
            near = self.near(members[0])
            shape = handle.layout.tile_shape(box)
            mine = owner == team.rank
            tile = handle.read(box).contiguous() if mine else torch.empty(shape, dtype=handle.dtype, device=team.device)
            team.send(tile, owner)
            boxes = [member[i] for member in members]
            if not mine:
                handle.write(boxes, tile)
            self.note(i, boxes, tile, near)


@dataclass
class Made:
    """What a tile came to besides the boundaries it wrote: its shares of reductions, by target."""

    parts: dict[int, Reduction] = field(default_factory=dict)

    def on(self, device: torch.device | str) -> Made:
        return Made({i: part.to(device) for i, part in self.parts.items()})
