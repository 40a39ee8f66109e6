"""Backward of a segment: evaluate each tile again with grad, and pull back its cotangents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.forward import Forward
from lightning_plugin.execute.gradients import Gradients, PulledReduction, RecalledCotangent
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.execute.tile_pass import TilePass
from lightning_plugin.graph import Value
from lightning_plugin.ops import Pieces
from lightning_plugin.private import is_scheduled, without_autocast
from lightning_plugin.program.findings import Owned
from lightning_plugin.program.program import Target
from lightning_plugin.program.replay import prevent_replay
from lightning_plugin.progress import profiler_range
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.team import Team

#: Most groups of identical tiles with equal cotangents; to find one, all remaining tiles are compared.
MAX_GROUPS = 8
#: Distance of the places of a cotangent that are looked at before all are: few tiles have zeros at all of these alone.
SAMPLED = 16


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One evaluation for one tile or several identical ones.

    Attributes:
        tiles: The tiles, of which the first is evaluated.
        sums: The sums of their cotangents, by target; None if the first tile's cotangents are pulled back.
    """

    tiles: Sequence[Owned]
    sums: dict[Target, Tensor] | None = None


class Backward:
    """One backward pass of a segment.

    Attributes:
        segment: The segment, as forward ran it.
        live_targets: The targets that have a cotangent.
        wanted: The maps that tiles read and whose gradients are needed.
        reductions: The cotangents and results of each reduction.
        map_cotangents: The cotangents of stored maps.
        leaves: The inputs as leaves of each tile's graph.
        gradients: Sums of the tiles' gradients.
        program: The program that makes the live targets.
        cotangents: The cotangents of stored maps by the place of their target in the program.
        tile_pass: The tiles.
    """

    def __init__(self, ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self.segment: SegmentRun = ctx.run
        self.ctx = ctx
        self.needs = ctx.needs_input_grad[4:]
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, self.needs, strict=True)]
        self.vectors, self.spreads, self.images = self.segment.split_inputs(self.leaves)
        self.boundaries: dict[Value, Boundary] = dict(zip(self.segment.boundaries, ctx.boundaries, strict=True))
        # Tokens are the last inputs of the autograd function.
        makers = ctx.next_functions[len(ctx.next_functions) - len(self.boundaries) :]
        followed = {v for v, (maker, _) in zip(self.boundaries, makers, strict=True) if is_scheduled(maker)}
        spreads = {v for v, t in self.spreads.items() if t.requires_grad}
        self.wanted = {v for v in (*followed, *spreads, *self.images) if v.requires_grad}
        self.gradients = Gradients(
            self.leaves[: len(self.vectors)],
            {**self.spreads, **self.images},
            self.boundaries,
            self.segment.backward_grid.tiles,
            self.segment.ledger,
        )
        self._handed_back: dict[int, Tensor] = {}
        if self.segment.team is not None:
            sum_over_ranks(self.segment.team, self.segment, ctx.cotangents)
        self.find_cotangents(grads)

    def find_cotangents(self, grads: Sequence[Tensor | None]) -> None:
        """Find the targets that have a cotangent, and their cotangents."""
        program = self.segment.program
        self.live_targets: list[Target] = []
        self.reductions: dict[Target, tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]] = {}
        self.map_cotangents: dict[Target, Cotangent | RecalledCotangent] = {}
        place = 0
        kept = dict(zip(self.segment.stored, self.ctx.cotangents, strict=True))
        for t in program.targets:
            if t.stored is None:
                count = len(t.node.outputs)
                mine = tuple(grads[place : place + count])
                results = tuple(self.ctx.results[place : place + count])
                place += count
                if any(g is not None for g in mine):
                    self.live_targets.append(t)
                    self.reductions[t] = (mine, results)
                continue
            cotangent = kept[t.stored]
            if cotangent.is_started:
                self.live_targets.append(t)
                self.map_cotangents[t] = cotangent
        for t, reductions in self.segment.recalls.items():
            self.recall(t, [r for r in reductions if r in self.reductions])

    def recall(self, target: Target, reductions: Sequence[Target]) -> None:
        """Pull back reductions of a map with the map's own cotangent; see [Note: recall] in `program.program`."""
        if not reductions:
            return
        pulled = [PulledReduction(t, t.operands(self.vectors), *self.reductions.pop(t)) for t in reductions]
        self.map_cotangents[target] = RecalledCotangent(self.ctx.recalled[target], pulled)
        self.live_targets = [
            t for t in self.segment.program.targets if t in self.map_cotangents or t in self.reductions
        ]

    def run(self) -> tuple[Tensor | None, ...]:
        segment = self.segment
        if self.live_targets and any(self.needs):
            for boundary in self.boundaries.values():
                boundary.restore_data()
            self.pull_back_tiles(segment if segment.scans else segment.narrow(self.live_targets))
            if segment.team is not None:
                ordinary = (*segment.spreads, *segment.images)
                self.gradients.reduce_over_ranks(segment.team, [v for v in ordinary if v in self.wanted])
        for cotangent in self.map_cotangents.values():
            cotangent.clear()
        vectors = map(self.gradients.of_vector, range(len(segment.program.vectors)))
        spreads = [self.gradients.of_map(v, self.spreads[v].dtype) for v in segment.spreads]
        images = [self.gradients.of_map(v, v.dtype) for v in segment.images]
        devices = [v.device for v in segment.boundaries]
        needs = self.needs[len(self.needs) - len(devices) :]
        tokens = [torch.zeros((), device=d) if need else None for d, need in zip(devices, needs, strict=True)]
        return (None, None, None, None, *vectors, *spreads, *images, *tokens)

    def pull_back_tiles(self, part: SegmentRun) -> None:
        """Pull back all tiles of the part of the segment that has cotangents."""
        program = self.program = part.program
        self.cotangents = {i: self.map_cotangents[t] for i, t in enumerate(program.targets) if t in self.map_cotangents}
        self.operands = [self.vectors[v] for v in program.vectors]
        tiles = self.tile_pass = TilePass(part, self.segment.backward_grid, self.boundaries, self.cotangents)
        with (
            without_autocast(part.autocast_type),
            tiles.count_memory(self.memory_key()) as known,
            part.home.queue.open_pool(),
        ):
            if known and part.rehearsal is not None:
                self.allocate_missing_gradients()
                return
            self.recompute_uncertain()
            tiles.set_largest_tiles()
            zero = self.zero_tiles()
            if zero:
                prevent_replay("tiles without a cotangent are left out")
            for identical in tiles:
                with tiles.watch_tile(identical[0]):
                    for evaluation in self.evaluations(identical):
                        if not all(owned in zero for owned in evaluation.tiles):
                            with profiler_range("tile"):
                                self.pull_back_tile(evaluation)
                self.segment.step.report_tiles(len(identical))
            self.allocate_missing_gradients()
            for boundary in self.boundaries.values():
                boundary.wait()
                boundary.cotangent.wait()
            for cotangent in self.map_cotangents.values():
                cotangent.wait()

    def allocate_missing_gradients(self) -> None:
        """Allocate zeros for the inputs that gradients of the live targets reach and that no tile gave one."""
        gradients, vectors = self.gradients, self.segment.program.vectors
        maps = [v for v in self.program.reads if v in self.wanted and not gradients.has_map(v)]
        places = [i for i in gradients.vectors if i not in gradients.vector_sums]
        if not maps and not places:
            return
        reached = self.program.differentiated(self.live_targets)
        gradients.allocate_missing([v for v in maps if v in reached], [i for i in places if vectors[i] in reached])

    def memory_key(self) -> Hashable | None:
        """Return a key that is equal for passes that hold the same bytes; see [Note: watched] in `ledger`."""
        reads = []
        for v in self.program.reads:
            boundary = self.boundaries.get(v)
            begun = boundary is not None and boundary.cotangent.is_started
            reads.append((v in self.wanted, begun))
        given = tuple(
            None if t in self.map_cotangents else tuple(g is None for g in self.reductions[t][0])
            for t in self.live_targets
        )
        leaves = tuple(t.requires_grad for t in self.leaves)
        same = self.segment.plan.forward == self.segment.backward_grid
        sums = tuple(self.gradients.sum_dtypes.items())
        recalled = tuple(c.key if isinstance(c, RecalledCotangent) else None for c in self.cotangents.values())
        return self.tile_pass.memory_key(self.leaves, "backward", *reads, given, leaves, same, sums, recalled)

    # The tiles

    def evaluations(self, identical: Sequence[Owned]) -> Iterator[Evaluation]:
        """Divide identical tiles into evaluations; see [Note: identical tiles] in `tile_pass`.

        If no input needs a gradient, there is one, with the sum of the cotangents. Otherwise there is one for each
        group of tiles with equal cotangents.
        """
        segment, remaining = self.segment, list(identical)
        if not self.wanted.isdisjoint(self.program.reads):
            for _ in range(MAX_GROUPS if len(remaining) > 1 else 0):
                equal = [self.have_equal_cotangents(remaining[0], owned) for owned in remaining]
                if sum(equal) < 2:
                    break
                yield Evaluation(list(compress(remaining, equal)))
                remaining = [owned for owned, is_equal in zip(remaining, equal, strict=True) if not is_equal]
            yield from (Evaluation([owned]) for owned in remaining)
            return
        # A rehearsal makes a sum too, so that it measures the memory.
        summing = len(identical) > 1 or (segment.groups_tiles and segment.rehearsal is not None)
        yield Evaluation(identical, self.sum_cotangents(identical) if summing else None)

    def have_equal_cotangents(self, one: Owned, other: Owned) -> bool:
        """True if the cotangents of two tiles are equal to the bit. A map's reductions add the same to both."""
        if one is other:
            return True
        given = {i: c.cotangent if isinstance(c, RecalledCotangent) else c for i, c in self.cotangents.items()}
        return all(torch.equal(c.read(one[i]), c.read(other[i])) for i, c in given.items() if c.is_started)

    def sum_cotangents(self, tiles: Sequence[Owned]) -> dict[Target, Tensor]:
        """Sum the tiles' cotangents of each stored target."""
        return {
            self.program.targets[i]: cotangent.sum_of([owned[i] for owned in tiles])
            for i, cotangent in self.cotangents.items()
            if not tiles[0][i].empty
        }

    def zero_tiles(self) -> Collection[Owned]:
        """Return the tiles whose cotangents are zero everywhere, which are not evaluated.

        Losses over drawn regions, and heads that take maxima, leave most of a map without a gradient. None is checked
        if maps are on a lower tier, if statistics add to all cotangents, in a scan, and if several ranks share the
        tiles. Inputs that no evaluated tile reaches get gradients of zeros (`allocate_missing_gradients`).
        """
        segment, cotangents = self.segment, self.cotangents
        on_device = all(isinstance(c, Cotangent) and c.home.tier == "device" for c in cotangents.values())
        skips = segment.scans or segment.team is not None or segment.rehearsal is not None
        if self.reductions or not cotangents or not on_device or skips:
            return ()
        tiles = list(self.tile_pass.all_owned())
        return set(self.tiles_of_zeros(self.tiles_of_zeros(tiles, SAMPLED), 1))

    def tiles_of_zeros(self, tiles: Sequence[Owned], step: int) -> list[Owned]:
        """Return those of some tiles whose cotangents are zero at every ``step``-th place of each dimension, by one
        read of the device."""
        counts = []
        for owned in tiles:
            read = [c.read(owned[i]) for i, c in self.cotangents.items() if not owned[i].empty]
            counts.append(torch.stack([t[(slice(None, None, step),) * t.dim()].count_nonzero() for t in read]).sum())
        found = torch.stack(counts).tolist() if counts else []
        return [owned for owned, count in zip(tiles, found, strict=True) if count == 0]

    def recompute_uncertain(self) -> None:
        """Recompute reductions whose results depend on the last bits of tiles (ties of maxima), on backward's tiles."""
        segment, grid = self.segment, self.segment.backward_grid
        if segment.plan.forward == grid and not segment.groups_tiles:
            return  # forward had the same tiles
        reducing = [t for t in self.live_targets if t in self.reductions]
        doubtful = [t for t in reducing if t.op.needs_backward_results(self.reductions[t][1], segment.groups_tiles)]
        if not doubtful:
            return
        part = segment.narrow(doubtful)
        found = Forward(part, segment.inputs_of_part(part, self.leaves), self.boundaries, grid)
        found.tile_pass.must_watch = False
        with torch.no_grad():
            found.evaluate(report=False)
        for i, t in enumerate(part.program.targets):
            grads, _ = self.reductions[t]
            self.reductions[t] = grads, t.finish(found.totals[i], self.vectors)

    # One tile

    def pull_back_tile(self, evaluation: Evaluation) -> None:
        """Evaluate a tile with grad, pull back its cotangents, and add its gradients to their sums."""
        program, tiles, first = self.program, evaluation.tiles, evaluation.tiles[0]
        reads: list[tuple[Value, Box, Tensor]] = []
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        tokens: list[Tensor] = []
        # A reduction's cotangent is the same for each tile: for a sum of tiles it counts once for each.
        count = 1 if evaluation.sums is None else len(tiles)

        def read(v: Value, box: Box) -> Tensor | Pieces:
            add_gradient = self.piece_receiver(v) if v in self.segment.uncut_axes and v in self.wanted else None
            tile = self.segment.read(v, box, self.spreads, self.boundaries.get(v), add_gradient)
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
            for value, cotangent in self.outputs_and_cotangents(target, box, made, evaluation):
                if value is not None and cotangent is not None and value.requires_grad:
                    outputs.append(value)
                    same = target.stored is None and count > 1
                    cotangents.append(cotangent * count if same else cotangent)

        carried = self.carried_rows(first)
        handed = self.tile_pass.evaluate(first, read, self.operands, emit, True, carried)
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
        for done in (outputs, leaves, cotangents, reads):  # frees buffers of reads before gradients are sent
            done.clear()  # type: ignore[attr-defined]
        self.gradients.add_to_vectors(found[: len(summed)], len(tiles) if evaluation.sums is None else 1)
        here = found[len(summed) :]
        for (v, box), g in zip(given, here, strict=False):
            if g is not None:
                for owned in tiles:
                    place = box if owned is first else self.tile_pass.reads(owned)[v]
                    self.gradients.add_to_map(v, place, g, self.segment.plan.ahead)
        back = zip((serial for serial, _ in rows), here[len(given) :], strict=False)
        self._handed_back = {serial: g for serial, g in back if g is not None}  # type: ignore[redundant-expr]

    def carried_rows(self, owned: Owned) -> dict[int, Tensor]:
        """Return the rows that a scan's tile was handed in forward, as leaves; see [Note: scan] in `program.scan`."""
        rows: dict[int, Tensor] = self.ctx.carried.get(owned, {})
        if not rows:
            return {}
        grads = {n.serial: n.outputs[0].requires_grad for n in self.program.nodes}
        return {serial: t.detach().requires_grad_(grads[serial]) for serial, t in rows.items()}

    def outputs_and_cotangents(
        self, target: Target, box: Box, made: Sequence[Tensor], evaluation: Evaluation
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Iterate over the tensors of a tile that lead to a target, each with its cotangent."""
        if target in self.map_cotangents:
            sums = evaluation.sums
            yield made[0], self.map_cotangents[target].read(box) if sums is None else sums.get(target)
        elif target in self.reductions:
            grads, results = self.reductions[target]
            yield from zip(
                target.op.pull_with_grad(box, made, target.operands(self.vectors), results), grads, strict=True
            )

    def piece_receiver(self, v: Value) -> Callable[[Box, Tensor], None]:
        """Return a function that adds the gradients of a boundary's pieces. They come in a nested pass of autograd, so
        that their memory has to be allocated here; see [Note: passes] in `private`."""
        self.gradients.allocate(v)
        return self.boundaries[v].cotangent.allocate().add


def sum_over_ranks(team: Team, segment: SegmentRun, cotangents: Sequence[Cotangent]) -> None:
    """Sum the cotangents of a segment's boundaries, to which each rank has added those of its own tiles; see [Note:
    team] in `team`."""
    program = segment.program
    places = [i for i, t in enumerate(program.targets) if t.stored is not None]
    is_started = team.any_rank([c.is_started for c in cotangents])
    for i, cotangent, needed in zip(places, cotangents, is_started, strict=True):
        if needed:
            boxes = (owned[i] for owned in program.owned(segment.backward_grid))
            for box in boxes:
                if not box.empty:
                    part = cotangent.allocate().read(box).clone(memory_format=torch.contiguous_format)
                    team.all_reduce(part)
                    cotangent.allocate().write(box, part)
