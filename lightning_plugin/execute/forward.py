"""Forward of a segment: evaluate each tile without grad, write stored maps, and merge reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.tile_pass import TilePass, Tiles
from lightning_plugin.graph import Value
from lightning_plugin.ops import Pieces, Reduction
from lightning_plugin.program.findings import Owned
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.team import Team


class Forward:
    """One forward pass of a segment over all tiles.

    Attributes:
        stored: The boundaries that it reads and makes.
        totals: The merged reductions so far, by the place of their target.
        carried: The rows that each tile of a scan was handed, which its backward begins with.
        evaluated: The number of tiles of stored maps so far.
    """

    def __init__(
        self, run: SegmentRun, inputs: Sequence[Tensor], stored: Mapping[Value, Boundary], grid: Grid | None = None
    ) -> None:
        self.segment = run
        self.inputs = inputs
        self.stored = stored
        vectors, spreads, _ = run.split_inputs([t.detach() for t in inputs])
        self.vectors, self.spreads = vectors, spreads
        self.operands = [vectors[v] for v in run.program.vectors]
        self.tile_pass = TilePass(run, run.plan.forward if grid is None else grid, stored)
        self.totals: dict[int, Reduction] = {
            i: start
            for i, t in enumerate(run.program.targets)
            if t.stored is None and (start := t.op.start) is not None
        }
        self.carried: dict[Owned, dict[int, Tensor]] = {}
        self.evaluated = 0
        self._handed_on: dict[int, Tensor] = {}
        #: Partial reductions of this rank's tiles, until the ranks exchange them; see [Note: team] in `team`.
        self._parts: list[dict[int, Reduction]] = []

    def run(self) -> list[Tensor]:
        """Evaluate all tiles, and return the reduced vectors in the order of the targets."""
        run = self.segment
        key = self.tile_pass.memory_key(self.inputs, "forward")
        with self.tile_pass.count_memory(key) as known, run.home.queue.open_pool():
            if known and run.rehearsal is not None:
                return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in run.outputs]
            self.evaluate()
            for v in (*run.stored, *run.boundaries):
                self.stored[v].wait()
        results: list[Tensor] = []
        for i, target in enumerate(run.program.targets):
            if target.stored is None:
                results.extend(target.finish(self.totals[i], self.vectors))
        return results

    def evaluate(self, report: bool = True) -> None:
        """Evaluate all tiles; with ``report``, report each to listeners."""
        self.tile_pass.set_largest_tiles()
        if self.segment.team is not None:
            self.evaluate_shared(self.segment.team, report)
            return
        for tiles in self.tile_pass:
            self.evaluate_tile(tiles, report)

    def evaluate_tile(self, tiles: Tiles, report: bool) -> None:
        """Evaluate a tile once for all that are identical to it."""
        run, first = self.segment, tiles[0]
        notes = run.team is None and bool(run.known_constants)
        near = notes and run.is_near_constant(self.tile_pass.reads(first))

        def emit(i: int, box: Box, made: Sequence[Tensor]) -> None:
            boxes = [owned[i] for owned in tiles]
            self.emit(i, boxes, made)
            if notes:
                self.note_constants(i, boxes, made[0], near)

        if run.team is not None:
            self._parts.append({})
        if run.scans and run.trains:
            self.carried[first] = self._handed_on
        with self.tile_pass.watch_tile(first), profiler_range("tile"):
            self._handed_on = self.tile_pass.evaluate(first, self.read, self.operands, emit, False, self._handed_on)
        if report:
            run.step.report_tiles(len(tiles))

    def read(self, v: Value, box: Box) -> Tensor | Pieces:
        return self.segment.read(v, box, self.spreads, self.stored.get(v))

    def emit(self, i: int, boxes: Sequence[Box], made: Sequence[Tensor]) -> None:
        """Write a target's tile to its stored map, or merge a partial reduction, once for each identical tile."""
        target = self.segment.program.targets[i]
        if target.stored is not None:
            self.stored[target.stored].write(boxes, made[0], self.segment.plan.ahead)
            return
        part = target.contribution(boxes, made, self.vectors)
        if self.segment.team is not None:
            self._parts[-1][i] = part
        else:
            self.merge(i, part)

    def merge(self, i: int, part: Reduction) -> None:
        op = self.segment.program.targets[i].op
        self.totals[i] = op.merge(self.totals[i], part) if i in self.totals else part

    # Background

    def note_constants(self, i: int, boxes: Sequence[Box], tile: Tensor, near: bool) -> None:
        """Note if a tile written to a stored map is constant; it may be if its inputs are constant in part (``near``).
        A rehearsal checks too, so that it measures the memory of the check."""
        v = self.segment.program.targets[i].stored
        if v is None:
            return
        constants, numbered = self.stored[v].constants, self.stored[v].numbered
        if numbered is not None:
            numbered.assign(boxes, self.evaluated)
        self.evaluated += 1
        if constants is None:
            return
        key = constants.mark_tile(v.space, tile, boxes[0]) if near else None
        for box in boxes[1:] if near else boxes:
            if near and key is None:
                constants.mark_tile(v.space, tile, box)
            else:
                constants.mark_box(box, key)

    # Several ranks

    def evaluate_shared(self, team: Team, report: bool) -> None:
        """Evaluate this rank's tiles, and exchange results with the other ranks after each round."""
        for dealt in team.rounds(self.tile_pass.all_tiles()):
            mine = self.tile_pass.prefetching(tiles for owner, tiles in dealt if owner == team.rank)
            for tiles in mine:
                self.evaluate_tile(tiles, report)
            made = [iter(rank) for rank in team.all_gather([move_reductions(parts, "cpu") for parts in self._parts])]
            self._parts.clear()
            for owner, tiles in dealt:
                self.receive(team, owner, tiles, next(made[owner]))

    def receive(self, team: Team, owner: int, tiles: Tiles, parts: Mapping[int, Reduction]) -> None:
        """Merge and store a rank's results of a tile. All ranks do this in the order of the grid, so that sums are
        equal."""
        for i, part in move_reductions(parts, team.device).items():
            self.merge(i, part)
        near = self.segment.is_near_constant(self.tile_pass.reads(tiles[0]))
        for i, target in enumerate(self.segment.program.targets):
            boundary = None if target.stored is None else self.stored[target.stored]
            box = tiles[0][i]
            if boundary is None or box.empty:
                continue
            shape = boundary.layout.tile_shape(box)
            mine = owner == team.rank
            tile = (
                boundary.read(box).contiguous()
                if mine
                else torch.empty(shape, dtype=boundary.dtype, device=team.device)
            )
            team.broadcast(tile, owner)
            boxes = [owned[i] for owned in tiles]
            if not mine:
                boundary.write(boxes, tile)
            self.note_constants(i, boxes, tile, near)


def move_reductions(parts: Mapping[int, Reduction], device: torch.device | str) -> dict[int, Reduction]:
    """Copy partial reductions to another device."""
    return {i: part.to(device) for i, part in parts.items()}
