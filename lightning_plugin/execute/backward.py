"""Backward of a segment: every tile again, with grad, and its cotangents pulled back."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.forward import Forward
from lightning_plugin.execute.gradients import Gradients, Pulled, Recalled
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.tile_pass import TilePass
from lightning_plugin.graph import Value
from lightning_plugin.ops import Pieces
from lightning_plugin.private import is_scheduled
from lightning_plugin.program.findings import Owned
from lightning_plugin.program.program import Target
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.team import Team

#: Identical tiles are looked through for so many groups with equal cotangents: each look compares all that are left.
MOST_GROUPS = 8


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One evaluation of a tile for several.

    Attributes:
        tiles: The tile, and those that it stands for.
        sums: The sums of their cotangents, by target; None where all are equal to the tile's own.
    """

    tiles: Sequence[Owned]
    sums: dict[Target, Tensor] | None = None


class Backward:
    """One backward pass of a segment.

    Attributes:
        segment: The segment, as forward ran it.
        alive: The targets that have a cotangent.
        wanted: The maps that tiles read and whose gradient is asked for.
        reduced: The cotangents and results of reductions.
        maps: The cotangents of stored maps.
        leaves: The inputs again, as leaves of each tile's graph.
        gradients: Sums of the gradients that tiles have given.
    """

    def __init__(self, ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self.segment: SegmentRun = ctx.run
        self.ctx = ctx
        self.needs = ctx.needs_input_grad[4:]
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, self.needs, strict=True)]
        self.vectors, self.spreads, self.images = self.segment.by_value(self.leaves)
        self.handles: dict[Value, Boundary] = dict(zip(self.segment.boundaries, ctx.handles, strict=True))
        # Tokens are the last tensors that autograd knows of; before them it has the other inputs.
        makers = ctx.next_functions[len(ctx.next_functions) - len(self.handles) :]
        followed = {v for v, (maker, _) in zip(self.handles, makers, strict=True) if is_scheduled(maker)}
        spreads = {v for v, t in self.spreads.items() if t.requires_grad}
        self.wanted = {v for v in (*followed, *spreads, *self.images) if v.requires_grad}
        self.gradients = Gradients(
            self.leaves[: len(self.vectors)],
            {**self.spreads, **self.images},
            self.handles,
            self.segment.backward_grid.tiles,
            self.segment.ledger,
        )
        self._handed_back: dict[int, Tensor] = {}
        if self.segment.team is not None:
            complete(self.segment.team, self.segment, ctx.cotangents)
        self.find_cotangents(grads)

    def find_cotangents(self, grads: Sequence[Tensor | None]) -> None:
        """Find the targets that have a cotangent, and it."""
        program = self.segment.program
        self.alive: list[Target] = []
        self.reduced: dict[Target, tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]] = {}
        self.maps: dict[Target, Cotangent | Recalled] = {}
        place = 0
        kept = dict(zip(self.segment.stored, self.ctx.cotangents, strict=True))
        for t in program.targets:
            if t.stored is None:
                count = len(t.node.outputs)
                mine = tuple(grads[place : place + count])
                results = tuple(self.ctx.results[place : place + count])
                place += count
                if any(g is not None for g in mine):
                    self.alive.append(t)
                    self.reduced[t] = (mine, results)
                continue
            cotangent = kept[t.stored]
            if cotangent.is_started:
                self.alive.append(t)
                self.maps[t] = cotangent
        for t, reductions in self.segment.recalls.items():
            self.recall(t, [r for r in reductions if r in self.reduced])

    def recall(self, target: Target, reductions: Sequence[Target]) -> None:
        """Pull reductions of a map back with the map's own cotangent; see [Note: recall] in `program.program`."""
        if not reductions:
            return
        pulled = [Pulled(t, t.operands(self.vectors), *self.reduced.pop(t)) for t in reductions]
        self.maps[target] = Recalled(self.ctx.recalled[target], pulled)
        self.alive = [t for t in self.segment.program.targets if t in self.maps or t in self.reduced]

    def run(self) -> tuple[Tensor | None, ...]:
        segment = self.segment
        if self.alive and any(self.needs):
            for handle in self.handles.values():
                handle.restore_data()
            self.over_tiles(segment if segment.scans else segment.narrowed(self.alive))
            if segment.team is not None:
                ordinary = (*segment.spreads, *segment.images)
                self.gradients.together(segment.team, [v for v in ordinary if v in self.wanted])
        for cotangent in self.maps.values():
            cotangent.clear()
        vectors = map(self.gradients.vector, range(len(segment.program.vectors)))
        spreads = [self.gradients.whole(v, self.spreads[v].dtype) for v in segment.spreads]
        images = [self.gradients.whole(v, v.dtype) for v in segment.images]
        kinds = [v.device for v in segment.boundaries]
        needs = self.needs[len(self.needs) - len(kinds) :]
        tokens = [torch.zeros((), device=d) if need else None for d, need in zip(kinds, needs, strict=True)]
        return (None, None, None, None, *vectors, *spreads, *images, *tokens)

    def over_tiles(self, part: SegmentRun) -> None:
        """Pull back every tile of the part of the segment that has cotangents."""
        program = self.program = part.program
        self.given = {i: self.maps[t] for i, t in enumerate(program.targets) if t in self.maps}
        self.operands = [self.vectors[v] for v in program.vectors]
        tiles = self.tiles = TilePass(part, self.segment.backward_grid, self.handles, self.given)
        with (
            torch.autocast(part.autocast_type, enabled=False),
            tiles.counted(self.key()) as known,
            part.at.queue.open_pool(),
        ):
            if known and part.rehearsal is not None:
                self.gradients.blank([v for v in program.reads if v in self.wanted])
                return
            self.recount()
            tiles.expect()
            zero = self.zero_tiles()
            for identical in tiles:
                with tiles.watching(identical[0]):
                    for evaluation in self.evaluations(identical):
                        if not all(owned in zero for owned in evaluation.tiles):
                            with profiler_range("tile"):
                                self.tile(evaluation)
                self.segment.step.done(len(identical))
            for handle in self.handles.values():
                handle.wait()
                handle.cotangent.wait()
            for cotangent in self.maps.values():
                cotangent.wait()

    def key(self) -> Hashable | None:
        """Key of passes that hold the same; see [Note: watched] in `ledger`."""
        reads = []
        for v in self.program.reads:
            handle = self.handles.get(v)
            begun = handle is not None and handle.cotangent.is_started
            reads.append((v in self.wanted, begun))
        given = tuple(None if t in self.maps else tuple(g is None for g in self.reduced[t][0]) for t in self.alive)
        leaves = tuple(t.requires_grad for t in self.leaves)
        same = self.segment.plan.forward == self.segment.backward_grid
        sums = tuple(self.gradients.types.items())
        recalled = tuple(c.key if isinstance(c, Recalled) else None for c in self.given.values())
        return self.tiles.key(self.leaves, "backward", *reads, given, leaves, same, sums, recalled)

    # The tiles

    def evaluations(self, identical: Sequence[Owned]) -> Iterator[Evaluation]:
        """Identical tiles as one evaluation with the sum of their cotangents, where nothing that they read needs a
        gradient; elsewhere those with equal cotangents, the others each by itself. See [Note: identical tiles] in
        `tile_pass`."""
        segment, rest = self.segment, list(identical)
        if not self.wanted.isdisjoint(self.program.reads):
            for _ in range(MOST_GROUPS if len(rest) > 1 else 0):
                equal = [self.equal(rest[0], owned) for owned in rest]
                if sum(equal) < 2:
                    break
                yield Evaluation(list(compress(rest, equal)))
                rest = [owned for owned, same in zip(rest, equal, strict=True) if not same]
            yield from (Evaluation([owned]) for owned in rest)
            return
        # A rehearsal makes a sum too, so that memory is there for it.
        summing = len(identical) > 1 or (segment.alike and segment.rehearsal is not None)
        yield Evaluation(identical, self.summed(identical) if summing else None)

    def equal(self, one: Owned, other: Owned) -> bool:
        """Compare the cotangents of two tiles to the bit. The part that a map's reductions add is the same in both."""
        if one is other:
            return True
        given = {i: c.cotangent if isinstance(c, Recalled) else c for i, c in self.given.items()}
        return all(torch.equal(c.read(one[i]), c.read(other[i])) for i, c in given.items() if c.is_started)

    def summed(self, tiles: Sequence[Owned]) -> dict[Target, Tensor]:
        """The sum of the tiles' cotangents of every stored target."""
        return {
            self.program.targets[i]: cotangent.sum_of([owned[i] for owned in tiles])
            for i, cotangent in self.given.items()
            if not tiles[0][i].empty
        }

    def zero_tiles(self) -> Container[Owned]:
        """The tiles whose cotangents are zero everywhere, but for one: nothing is recomputed for them.

        Losses over drawn regions, and heads that take maxima, leave most of a map without a gradient. All tiles are
        looked at with one read of the device. Nothing is looked for where maps lie on a lower tier, where statistics
        add to all cotangents, where tiles hand rows on, and where several ranks share the tiles. One tile is always
        evaluated: a gradient of zeros is one, too.
        """
        segment, given = self.segment, self.given
        here = all(isinstance(c, Cotangent) and c.home.tier == "device" for c in given.values())
        elsewhere = segment.team is not None or segment.rehearsal is not None
        if self.reduced or not given or not here or segment.scans or elsewhere:
            return ()
        tiles = list(self.tiles.owned())
        counts = [
            torch.stack([torch.count_nonzero(c.read(owned[i])) for i, c in given.items() if not owned[i].empty]).sum()
            for owned in tiles
        ]
        zero = [owned for owned, count in zip(tiles, torch.stack(counts).tolist(), strict=True) if count == 0]
        return set(zero if len(zero) < len(tiles) else zero[1:])

    def recount(self) -> None:
        """Find results that depend on the last bits of tiles as backward's tiles come to them, in a pass of its own."""
        segment, grid = self.segment, self.segment.backward_grid
        if segment.plan.forward == grid and not segment.alike:
            return  # forward's tiles were these
        reducing = [t for t in self.alive if t in self.reduced]
        doubtful = [t for t in reducing if t.op.uncertain(self.reduced[t][1], segment.alike)]
        if not doubtful:
            return
        part = segment.narrowed(doubtful)
        found = Forward(part, segment.inputs_of(part, self.leaves), self.handles, grid)
        found.tiles.watched = False
        with torch.no_grad():
            found.evaluate(report=False)
        for i, t in enumerate(part.program.targets):
            grads, _ = self.reduced[t]
            self.reduced[t] = grads, t.finish(found.totals[i], self.vectors)

    # One tile

    def tile(self, evaluation: Evaluation) -> None:
        """Evaluate a tile with grad, pull back, and give every gradient to whom it belongs."""
        program, tiles, first = self.program, evaluation.tiles, evaluation.tiles[0]
        reads: list[tuple[Value, Box, Tensor]] = []
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        tokens: list[Tensor] = []
        # A reduction's cotangent is the same for every tile: of summed tiles it counts as often as there are tiles.
        count = 1 if evaluation.sums is None else len(tiles)

        def read(v: Value, box: Box) -> Tensor | Pieces:
            give = self.piecewise(v) if v in self.segment.strips and v in self.wanted else None
            tile = self.segment.read(v, box, self.spreads, self.handles.get(v), give)
            if isinstance(tile, Pieces):
                tokens.append(tile.token)
                return tile
            tile = tile.detach()
            if v in self.wanted:
                tile.requires_grad_()
                reads.append((v, box, tile))
            return tile

        def emit(i: int, box: Box, made: Sequence[Tensor]) -> None:
            target = program.targets[i]
            for value, cotangent in self.pulls(target, box, made, evaluation):
                if value is not None and cotangent is not None and value.requires_grad:
                    outputs.append(value)
                    same = target.stored is None and count > 1
                    cotangents.append(cotangent * count if same else cotangent)

        carried = self.carried(first)
        handed = self.tiles.evaluate(first, read, self.operands, emit, True, carried)
        for serial, gradient in self._handed_back.items():
            if handed[serial].requires_grad:
                outputs.append(handed[serial])
                cotangents.append(gradient)
        self._handed_back = {}
        del handed
        rows = [(serial, t) for serial, t in carried.items() if t.requires_grad]
        summed = self.gradients.vectors
        leaves = [*(self.leaves[i] for i in summed), *(t for _, _, t in reads), *(t for _, t in rows)]
        leaves += [t for t in tokens if t.requires_grad]
        if not outputs or not leaves:
            return
        found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        given = [(v, box) for v, box, _ in reads]
        for done in (outputs, leaves, cotangents, reads):  # what was fetched is free for what is sent back
            done.clear()  # type: ignore[attr-defined]
        self.gradients.add(found[: len(summed)], len(tiles) if evaluation.sums is None else 1)
        here = found[len(summed) :]
        for (v, box), g in zip(given, here, strict=False):
            if g is not None:
                for owned in tiles:
                    place = box if owned is first else self.tiles.reads(owned)[v]
                    self.gradients.give(v, place, g, self.segment.plan.ahead)
        back = zip((serial for serial, _ in rows), here[len(given) :], strict=False)
        self._handed_back = {serial: g for serial, g in back if g is not None}  # type: ignore[redundant-expr]

    def carried(self, owned: Owned) -> dict[int, Tensor]:
        """The rows that a scan's tile was handed in forward, as leaves; see [Note: scan] in `program.scan`."""
        rows: dict[int, Tensor] = self.ctx.carried.get(owned, {})
        if not rows:
            return {}
        grads = {n.serial: n.outputs[0].requires_grad for n in self.program.nodes}
        return {serial: t.detach().requires_grad_(grads[serial]) for serial, t in rows.items()}

    def pulls(
        self, target: Target, box: Box, made: Sequence[Tensor], evaluation: Evaluation
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The tensors of a tile that lead to a target, each with its cotangent."""
        if target in self.maps:
            yield made[0], self.maps[target].read(box) if evaluation.sums is None else evaluation.sums.get(target)
        elif target in self.reduced:
            grads, results = self.reduced[target]
            yield from zip(target.op.pulled(box, made, target.operands(self.vectors), results), grads, strict=True)

    def piecewise(self, v: Value) -> Callable[[Box, Tensor], None]:
        """Receiver of the gradients of a boundary's pieces. They come in a pass of autograd's within this one, so that
        room is made for them here; see [Note: passes] in `private`."""
        self.gradients.room_for(v)
        return self.handles[v].cotangent.allocate().add


def complete(team: Team, segment: SegmentRun, cotangents: Sequence[Cotangent]) -> None:
    """The cotangents of a segment's boundaries, of which each rank has collected its tiles' share; see [Note: team] in
    `team`."""
    program = segment.program
    places = [i for i, t in enumerate(program.targets) if t.stored is not None]
    there = team.any_rank([c.is_started for c in cotangents])
    for i, cotangent, needed in zip(places, cotangents, there, strict=True):
        if needed:
            boxes = (owned[i] for owned in program.owned(segment.backward_grid))
            for box in boxes:
                if not box.empty:
                    part = cotangent.allocate().read(box).clone(memory_format=torch.contiguous_format)
                    team.all_reduce(part)
                    cotangent.allocate().write(box, part)
