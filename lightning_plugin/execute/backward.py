"""Backward of a segment: every tile again, with grad, and its cotangents pulled back.

One pass is one object: tiles alone, tiles that stand for others, and a scan's tiles in reverse share what they pull and
give.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.alike import Owned
from lightning_plugin.execute.gradients import Gradients
from lightning_plugin.execute.recalled import Pulled, Recalled, likeness
from lightning_plugin.execute.segment import SegmentRun, outline, read_from
from lightning_plugin.graph import Value
from lightning_plugin.ops import Pieces, Reduction
from lightning_plugin.passes import will_run
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.scan import run_tile, scan
from lightning_plugin.program.tape import Emit, Read, ScanTile
from lightning_plugin.progress import ranged
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.team import Team

#: Identical tiles are looked through for so many groups with equal cotangents: each look compares all that are left.
MOST_GROUPS = 8


@dataclass(eq=False)
class Tile:
    """One evaluation in backward.

    Attributes:
        members: The tile, and those that are identical to it.
        cotangents: The sums of the members' cotangents, by the serials of the stored targets' nodes; None where the
            tile's own are read.
        scan: The tile of a scan.
        carried: Rows that a scan's tile was handed.
        handed_back: Gradients of the rows that it handed on.
        number: The number of a scan's tile.
    """

    members: Sequence[Owned]
    cotangents: dict[int, Tensor] | None = None
    scan: ScanTile | None = None
    carried: dict[int, Tensor] = field(default_factory=dict)
    handed_back: dict[int, Tensor] = field(default_factory=dict)
    number: int = 0


class Backward:
    """One backward pass of a segment."""

    def __init__(self, ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self.segment: SegmentRun = ctx.run
        self.ctx = ctx
        program = self.segment.program
        needs = ctx.needs_input_grad[4:]
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        first, second = len(program.vectors), len(program.vectors) + len(self.segment.spreads)
        self.vectors = dict(zip(program.vectors, self.leaves, strict=False))
        self.spreads = dict(zip(self.segment.spreads, self.leaves[first:], strict=False))
        self.images = dict(zip(self.segment.images, self.leaves[second:], strict=False))
        self.handles: dict[Value, Boundary] = {
            v: ref() for v, ref in zip(self.segment.boundaries, ctx.handles, strict=True)
        }
        # Tokens are the last tensors that autograd knows of; before them it has the marker and the other inputs.
        makers = ctx.next_functions[len(ctx.next_functions) - len(self.handles) :]
        self.followed = {key for key, (maker, _) in zip(self.handles, makers, strict=True) if will_run(maker)}
        self.needs = needs
        self.watched = True
        self.gradients = Gradients(
            self.leaves[:first],
            {**self.spreads, **self.images},
            self.handles,
            self.segment.backward_grid.tiles,
            self.segment.ledger,
        )
        if self.segment.team is not None:
            complete(self.segment.team, self.segment, ctx.cotangents)
        self.cotangents(grads)

    def cotangents(self, grads: Sequence[Tensor | None]) -> None:
        """Which targets have a cotangent, and what it is."""
        program = self.segment.program
        self.alive: list[Target] = []
        self.reduced: dict[int, tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]] = {}
        self.maps: dict[int, Cotangent | Recalled] = {}
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
                    self.reduced[t.node.serial] = (mine, results)
                continue
            cotangent = kept[t.stored]
            if cotangent.begun:
                self.alive.append(t)
                self.maps[t.node.serial] = cotangent
        for serial, reductions in self.segment.recalls.items():
            self.recall(serial, [t for t in reductions if t in self.alive])

    def recall(self, serial: int, reductions: Sequence[Target]) -> None:
        """Pull reductions of a map back with the map's own cotangent; see [Note: recall] in `program.recall`."""
        if not reductions:
            return
        pulled = [Pulled(t, t.operands(self.vectors), *self.reduced.pop(t.node.serial)) for t in reductions]
        self.maps[serial] = Recalled(self.ctx.recalled[serial](), pulled)
        alive = {t.node.serial for t in self.alive if t not in reductions} | {serial}
        self.alive = [t for t in self.segment.program.targets if t.node.serial in alive]

    def run(self) -> tuple[Tensor | None, ...]:
        segment = self.segment
        if self.alive and any(self.needs):
            for handle in self.handles.values():
                handle.bring_back()
            self.program = segment.program if segment.scans else segment.program.narrow(self.alive)
            self.tapes = segment.tapes(self.program, segment.backward_grid)
            self.operands = [self.vectors[v] for v in self.program.vectors]
            self.over_tiles()
            if segment.team is not None:
                ordinary = (*segment.spreads, *segment.images)
                self.gradients.together(segment.team, [v for v in ordinary if self.wanted(v)])
        for cotangent in self.maps.values():
            cotangent.clear()
        vectors = map(self.gradients.vector, range(len(segment.program.vectors)))
        spreads = [self.gradients.whole(v, self.spreads[v].dtype) for v in segment.spreads]
        images = [self.gradients.whole(v, v.dtype) for v in segment.images]
        kinds = [v.device for v in segment.boundaries]
        needs = self.needs[len(self.needs) - len(kinds) :]
        tokens = [torch.zeros((), device=d) if need else None for d, need in zip(kinds, needs, strict=True)]
        return (None, None, None, None, *vectors, *spreads, *images, *tokens)

    def over_tiles(self) -> None:
        """All tiles."""
        segment = self.segment
        with (
            torch.autocast(segment.kind, enabled=False),
            segment.counted(self.tapes, self.likeness()) as known,
            segment.at.queue.pooling(),
        ):
            if known and segment.rehearsal is not None:
                self.gradients.blank(filter(self.wanted, self.program.reads))
                return
            self.watched = not known
            if segment.scans:
                self.scan()
            else:
                self.grid()
            for handle in self.handles.values():
                handle.rest()
                handle.cotangent.rest()
            for cotangent in self.maps.values():
                cotangent.rest()

    def likeness(self) -> Hashable | None:
        """Key of passes that hold the same; see [Note: watched] in `ledger`."""
        segment = self.segment
        reads = []
        for v in self.program.reads:
            handle = self.handles.get(v)
            begun = handle is not None and handle.cotangent.begun
            reads.append((self.wanted(v), begun))
        given = tuple(
            None if t.node.serial in self.maps else tuple(g is None for g in self.reduced[t.node.serial][0])
            for t in self.alive
        )
        leaves = tuple(t.requires_grad for t in self.leaves)
        same = segment.plan.forward == segment.backward_grid
        adders = tuple((i, adder.kept) for i, adder in self.gradients.adders.items())
        recalled = tuple(map(likeness, (self.maps.get(t.node.serial) for t in self.alive)))
        where = [read_from(v, self.handles.get(v)) for v in self.program.reads]
        return segment.likeness(
            self.tapes, self.leaves, where, "backward", *reads, given, leaves, same, adders, recalled
        )

    # The tiles

    def grid(self) -> None:
        """Tile by tile; only what leads to a cotangent is recomputed."""
        segment, program = self.segment, self.program
        self.recount()
        cotangents = self.given(program)
        segment.expect(lambda: outline(program, segment.backward_grid), self.handles, cotangents)
        fetch = segment.fetch(self.handles, cotangents)
        zero = self.zero_tiles()
        for members in segment.loop(self.tapes, self.handle, fetch):
            with segment.watching(self.watched and segment.watch(self.tapes, members[0])):
                for tile in self.evaluations(members):
                    if not all(tuple(owned) in zero for owned in tile.members):
                        with ranged("tile"):
                            self.tile(program, tile)

    def evaluations(self, members: Sequence[Owned]) -> Iterator[Tile]:
        """Identical tiles as one evaluation with the sum of their cotangents, where nothing that they read needs a
        gradient; elsewhere those with equal cotangents, the others each by itself. See [Note: identical tiles] in
        `alike`."""
        segment, rest = self.segment, list(members)
        if any(map(self.wanted, self.program.reads)):
            for _ in range(MOST_GROUPS):
                equal = [self.equal(rest[0], owned) for owned in rest]
                if sum(equal) < 2:
                    break
                yield Tile(list(compress(rest, equal)))
                rest = [owned for owned, same in zip(rest, equal, strict=True) if not same]
            yield from (Tile([owned]) for owned in rest)
            return
        # A rehearsal makes a sum too, so that memory is there for it.
        summing = len(members) > 1 or (segment.alike and segment.rehearsal is not None)
        yield Tile(members, self.summed(members) if summing else None)

    def equal(self, one: Owned, other: Owned) -> bool:
        """Compare the cotangents of two tiles to the bit. The part that a map's reductions add is the same in both."""
        if one is other:
            return True
        given = {i: c.cotangent if isinstance(c, Recalled) else c for i, c in self.given(self.program).items()}
        return all(torch.equal(c.read(one[i]), c.read(other[i])) for i, c in given.items() if c.begun)

    def summed(self, members: Sequence[Owned]) -> dict[int, Tensor]:
        """The sum of the tiles' cotangents of every stored target."""
        sums: dict[int, Tensor] = {}
        for i, cotangent in self.given(self.program).items():
            if not members[0][i].empty:
                sums[self.program.targets[i].node.serial] = cotangent.summed([member[i] for member in members])
        return sums

    def zero_tiles(self) -> Container[tuple[Box, ...]]:
        """The tiles whose cotangents are zero everywhere, but for one: nothing is recomputed for them.

        Losses over drawn regions, and heads that take maxima, leave most of a map without a gradient. All tiles are
        looked at with one read of the device. Nothing is looked for where maps lie on a lower tier, where statistics
        add to all cotangents, and where several ranks share the tiles. One tile is always evaluated: a gradient of
        zeros is one, too.
        """
        segment, given = self.segment, self.given(self.program)
        here = all(isinstance(c, Cotangent) and c.home.tier == "device" for c in given.values())
        if self.reduced or not given or not here or segment.team is not None or segment.rehearsal is not None:
            return ()
        tiles = [tuple(owned) for owned in self.tapes.owned()]
        counts = [
            torch.stack([torch.count_nonzero(c.read(owned[i])) for i, c in given.items() if not owned[i].empty]).sum()
            for owned in tiles
        ]
        zero = [owned for owned, count in zip(tiles, torch.stack(counts).tolist(), strict=True) if count == 0]
        return set(zero if len(zero) < len(tiles) else zero[1:])

    def recount(self) -> None:
        """Find results that depend on the last bits of tiles as backward's tiles come to them, in a pass of its own."""
        segment = self.segment
        if segment.plan.forward == segment.backward_grid and not segment.alike:
            return  # forward's tiles were these
        reducing = [t for t in self.alive if t.node.serial in self.reduced]
        doubtful = [t for t in reducing if t.op.uncertain(self.reduced[t.node.serial][1], segment.alike)]
        if not doubtful:
            return
        program = segment.program.narrow(doubtful)
        for t, total in zip(program.targets, self.totals(program), strict=True):
            self.reduced[t.node.serial] = self.reduced[t.node.serial][0], t.finish(total, self.vectors)

    def totals(self, program: Program) -> list[Reduction]:
        """The reductions of a program over backward's tiles, of all ranks."""
        segment = self.segment
        found: dict[int, Reduction] = {}

        def read(v: Value, box: Box) -> Tensor | Pieces:
            tile = self.segment.read(v, box, self.spreads, self.handle(v))
            return tile if isinstance(tile, Pieces) else tile.detach()

        segment.expect(lambda: outline(program, segment.backward_grid), self.handles, {})
        tapes = segment.tapes(program, segment.backward_grid)
        operands = [self.vectors[v] for v in program.vectors]
        with torch.no_grad():
            fetch = segment.fetch(self.handles)
            for members in segment.loop(tapes, self.handle, fetch, planned=False):

                def emit(i: int, box: Box, tiles: Sequence[Tensor], times: int = len(members)) -> None:
                    t = program.targets[i]
                    part = t.part(box, tiles, self.vectors, times)
                    found[i] = t.op.merge(found[i], part) if i in found else part

                tapes.run(members[0], read, operands, emit, grad=False)
        if segment.team is not None:
            ranks = segment.team.gather({i: part.to("cpu") for i, part in found.items()})
            parts = {i: [r[i].to(t.map.device) for r in ranks if i in r] for i, t in enumerate(program.targets)}
            found = {i: reduce(program.targets[i].op.merge, of_ranks) for i, of_ranks in parts.items()}
        return [found[i] for i in range(len(program.targets))]

    def handle(self, v: Value) -> Boundary | None:
        """Where a boundary that is read lies."""
        return self.handles.get(v)

    def given(self, program: Program) -> dict[int, Cotangent | Recalled]:
        """The cotangents of stored targets by their place."""
        return {i: self.maps[t.node.serial] for i, t in enumerate(program.targets) if t.node.serial in self.maps}

    def scan(self) -> None:
        """A scan's tiles in reverse, each with the cotangents of what it handed on; see [Note: scan]."""
        program = self.segment.program
        tiles = list(zip(scan(program, self.segment.backward_grid), self.ctx.carried, strict=True))
        self.segment.expect(lambda: [(t.reads, t.owned) for t, _ in tiles], self.handles, self.given(program))
        back: dict[int, Tensor] = {}
        for ((number, (tile, carried)),) in self.segment.step.told([pair] for pair in reversed([*enumerate(tiles)])):
            with self.segment.watching(), ranged("tile"):
                back = self.tile(program, Tile([tile.owned], None, tile, carried, back, number))

    def wanted(self, v: Value) -> bool:
        """Whether something that a tile reads needs a gradient."""
        return v.requires_grad and (
            v in self.followed or v in self.images or (v in self.spreads and self.spreads[v].requires_grad)
        )

    # One tile

    def tile(self, program: Program, work: Tile) -> dict[int, Tensor]:
        """Evaluate a tile with grad, pull back, and give every gradient to whom it belongs.

        The gradients of what a scan's tile was handed are returned.
        """
        reads: list[tuple[Value, Box, Tensor]] = []
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        tokens: list[Tensor] = []
        # A reduction's cotangent is the same for every tile: of summed tiles it counts as often as there are tiles.
        count = 1 if work.cotangents is None else len(work.members)

        def read(v: Value, box: Box) -> Tensor | Pieces:
            tile = self.segment.read(v, box, self.spreads, self.handle(v), self.piecewise(v))
            if isinstance(tile, Pieces):
                tokens.append(tile.token)
                return tile
            tile = tile.detach()
            if self.wanted(v):
                tile.requires_grad_()
                reads.append((v, box, tile))
            return tile

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            target = program.targets[i]
            for value, cotangent in self.pulls(target, i, box, tiles, work):
                if value is not None and cotangent is not None and value.requires_grad:
                    outputs.append(value)
                    same = target.stored is None and count > 1
                    cotangents.append(cotangent * count if same else cotangent)

        handed = self.evaluate(program, work, read, emit)
        carried = [(serial, t) for serial, t in work.carried.items() if t.requires_grad]
        for serial, gradient in work.handed_back.items():
            if handed[serial].requires_grad:
                outputs.append(handed[serial])
                cotangents.append(gradient)
        del handed
        adders = self.gradients.adders
        leaves = [*(self.leaves[i] for i in adders), *(t for _, _, t in reads), *(t for _, t in carried)]
        leaves += [t for t in tokens if t.requires_grad]
        if not outputs or not leaves:
            return {}
        found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        given = [(v, box) for v, box, _ in reads]
        for done in (outputs, leaves, cotangents, reads):  # what was fetched is free for what is sent back
            done.clear()  # type: ignore[attr-defined]
        self.gradients.add(found[: len(adders)], len(work.members) if work.cotangents is None else 1)
        here = found[len(adders) : len(adders) + len(given) + len(carried)]
        for (v, box), g in zip(given, here, strict=False):
            if g is not None:
                for owned in work.members:
                    place = box if owned is work.members[0] else self.tapes.boxes(owned)[v]
                    self.gradients.give(v, place, g, self.segment.plan.ahead)
        back = zip((serial for serial, _ in carried), here[len(given) :], strict=True)
        return {serial: g for serial, g in back if g is not None}  # type: ignore[redundant-expr]

    def evaluate(
        self,
        program: Program,
        work: Tile,
        read: Read,
        emit: Emit,
    ) -> dict[int, Tensor]:
        if work.scan is None:
            self.tapes.run(work.members[0], read, self.operands, emit, grad=True)
            return {}
        grads = {n.serial: n.outputs[0].requires_grad for n in program.steps}
        work.carried = {s: t.detach().requires_grad_(grads[s]) for s, t in work.carried.items()}
        tape = self.tapes.of_scan(work.number, work.scan)
        return run_tile(tape, program, work.scan, work.carried, read, self.operands, emit, grad=True)

    def pulls(
        self, target: Target, i: int, box: Box, tiles: Sequence[Tensor], work: Tile
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """What a tile contributes to a target, each part with its cotangent."""
        serial = target.node.serial
        if serial in self.maps:
            ready = None if work.cotangents is None else work.cotangents.get(serial)
            yield tiles[0], self.maps[serial].read(box) if ready is None else ready
        elif serial in self.reduced:
            grads, results = self.reduced[serial]
            yield from zip(target.op.pulled(box, tiles, target.operands(self.vectors), results), grads, strict=True)

    def piecewise(self, v: Value) -> Callable[[Box, Tensor], None] | None:
        """What takes the gradients of the pieces of a boundary. They come in a pass of autograd's within this one, so
        that room is made for them here; see [Note: passes] in `passes`."""
        if v not in self.segment.strips or not self.wanted(v):
            return None
        self.gradients.room_for(v)
        return self.handles[v].cotangent.room().add


def complete(team: Team, segment: SegmentRun, cotangents: Sequence[Cotangent]) -> None:
    """The cotangents of a segment's boundaries, of which each rank has collected its tiles' share; see [Note: team] in
    `team`."""
    program = segment.program
    places = [i for i, t in enumerate(program.targets) if t.stored is not None]
    there = team.any([c.begun for c in cotangents])
    for i, cotangent, needed in zip(places, cotangents, there, strict=True):
        if needed:
            boxes = (owned[i] for owned in program.owned(segment.backward_grid))
            for box in boxes:
                if not box.empty:
                    part = cotangent.room().read(box).clone(memory_format=torch.contiguous_format)
                    team.sum(part)
                    cotangent.room().write(box, part)
