"""One direction of a segment, over all its tiles: their order, and the preparations for each.

A pass goes over a grid, whose tiles are independent, or over a scan, whose tiles hand rows on: in order forward, in
reverse backward. Of identical tiles one stands for all ([Note: identical tiles]). Several ranks share
the tiles of a grid. A rehearsal has a few that stand for all.

`Forward` and `Backward` say what becomes of a tile. Neither knows in which order tiles come.

[Note: identical tiles] Most of a slide is background of one value. Two tiles are *identical* when all they read is the
same (constant, with the same values; or made by one computation), and all their boxes have the same extents, lie at the
same borders and are padded alike (a window wider than a tile is padded by another length in each tile near the border):
then they are the same computation. Forward computes one of them, writes it to all of their places and merges its share
of each reduction as often as there are tiles. Where a stored map comes out constant is noted when it is written
([Note: background] in `constants`), and so is which of its tiles one computation has made: kernels do not give all
positions of a constant tile the same last bits. So the next segment finds identical tiles in it too.

Backward is linear in the cotangents: one evaluation, pulled back with the sum of the tiles' cotangents, gives the sum
of their parameter gradients. Where what is read needs a gradient, each tile has its own, and is evaluated by itself: a
first segment over images, and segments behind a frozen trunk, share backward; others share forward only, but for
tiles whose cotangents are equal, too: those have equal gradients. Attribution of a pooled score, nine tenths of whose
image are background, takes half the time by that.

It holds for operators that do nothing but what their tiles' values say (`Op.uniform`): a dropout mask or an index of
a maximum depends on where a tile lies, so that a segment with such an operator computes each tile. Tiles whose shares
of a reduction land in different slices of it (two images', of a pool over each) are computed each, too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from lightning_plugin.boxes import Box, Grid, on_axis, telling
from lightning_plugin.execute.gradients import Recalled
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.graph import Value
from lightning_plugin.ledger import watched
from lightning_plugin.ops import Source, TileOp
from lightning_plugin.program.findings import Owned, Tapes
from lightning_plugin.program.program import Program
from lightning_plugin.program.scan import scan
from lightning_plugin.residency.boundary import Boundary, Cotangent

K = TypeVar("K", bound=Hashable)
#: A tile, and those that are identical to it.
Tiles = Sequence[Owned]


class TilePass:
    """The tiles of a run's program on a grid.

    Attributes:
        run: The segment.
        stored: The boundaries that tiles read and, in forward, write.
        cotangents: The cotangents that they read, by the place of the target; None in forward.
        tapes: Evaluates a tile.
        watched: True if nothing is known yet of what the pass holds; see [Note: watched] in `ledger`.
    """

    def __init__(
        self,
        run: SegmentRun,
        grid: Grid,
        stored: Mapping[Value, Boundary],
        cotangents: Mapping[int, Cotangent | Recalled] | None = None,
    ) -> None:
        self.run = run
        self.stored = stored  # no copy: the maps of a run that has failed go with its frame
        self.cotangents = cotangents
        program, compiler, tiles = run.program, run.step.compiler, scan(run.program, grid) if run.scans else ()
        if compiler is not None and not compiler.takes(program, run.scans):
            compiler = None
        self.tapes = Tapes(program, grid, run.step.library, tiles, compiler, run.ledger, run.see)
        self.watched = True
        #: True if something of a tile may be there when the next begins.
        self.lasts = bool(run.plan.ahead or run.team is not None or program.announced)

    def __iter__(self) -> Iterator[Tiles]:
        """The tiles that this process evaluates, each with those that are identical to it."""
        work, team = self.work(), self.run.team
        return self.announced(work if team is None else team.own_share(work))

    def work(self) -> Iterator[Tiles]:
        """The tiles of all ranks, each with those that are identical to it."""
        run, tapes = self.run, self.tapes
        if run.scans:
            tiles = list(tapes.owned())
            return ([owned] for owned in (tiles if self.cotangents is None else reversed(tiles)))
        grid, ahead = tapes.grid, run.plan.ahead or bool(run.program.announced)
        found = tapes.owned() if run.rehearsal is None else run.rehearsal.tiles(run.program, grid, ahead)
        if not run.alike:
            return ([owned] for owned in found)
        tiles, grouped = list(found), run.grouped if run.rehearsal is None else {}
        if grid not in grouped:
            grouped[grid] = self.groups(tiles)
        return ([tiles[place] for place in places] for places in grouped[grid])

    # Identical tiles

    def groups(self, tiles: Sequence[Owned]) -> list[list[int]]:
        """The places of tiles that are the same computation, together; the others by themselves, all in the order of
        the grid."""
        found: dict[object, list[int]] = {}
        for place, owned in enumerate(tiles):
            key = self.tile_key(owned)
            found.setdefault(place if key is None else key, []).append(place)
        return list(found.values())

    def tile_key(self, owned: Owned) -> object | None:
        """Equal for two tiles that are the same computation; None for a tile of its own."""
        program, need = self.run.program, self.tapes.boxes(owned)
        values = []
        for v in program.reads:
            if v in need:
                key = self.content(v, need[v])
                if key is None:
                    return None
                values.append(key)
        lands = tuple(
            t.op.lands(box) for t, box in zip(program.targets, owned, strict=True) if t.stored is None and not box.empty
        )
        lie = [lying(box, t.map.space.extent) for t, box in zip(program.targets, owned, strict=True)]
        lie += [
            lying(need[v], v.space.extent)
            for v in (*program.reads, *(v for n in program.steps for v in n.outputs))
            if v.is_map and v in need
        ]
        return tuple(values), tuple(lie), tuple(padding(program, need)), lands

    def content(self, v: Value, box: Box) -> Hashable | None:
        """Key of the contents of a box that is read: equal contents are those of a constant, or made by one
        computation. None where the box is like no other."""
        found, run = self.stored.get(v), self.run
        if found is None:
            return run.sources[v].holds(box) if v in run.sources else run.known[v].at(box)
        key = None if found.constants is None else found.constants.at(box)
        return key if key is not None or found.made is None else found.made.signature(box)

    # Before a tile

    def announced(self, work: Iterator[Tiles]) -> Iterator[Tiles]:
        """The same tiles; while one is computed, the next is announced: to sources that can prefetch, and to lower
        tiers if the segment transfers ahead."""
        run = self.run
        sources = [] if run.scans else run.program.announced
        if run.scans or not (sources or run.plan.ahead):
            yield from work
            return
        now = next(work, None)
        while now is not None:
            after = next(work, None)
            if after is not None:
                need = self.tapes.boxes(after[0])
                with self.counting():
                    for v in sources:
                        if v in need:
                            run.sources[v].prefetch(need[v])
                    if run.plan.ahead:
                        self.fetch(need, after[0])
            yield now
            now = after

    def fetch(self, need: Mapping[Value, Box], owned: Owned) -> None:
        """Begin to read a tile's part of boundaries and cotangents from lower tiers."""
        for v in self.run.boundaries:
            if v in need and v not in self.run.strips:
                self.stored[v].fetch(need[v])
        for i, cotangent in (self.cotangents or {}).items():
            if not owned[i].empty:
                cotangent.fetch(owned[i])

    def expect(self) -> None:
        """Let maps on lower tiers know of the largest tiles to come, before the first."""
        run, tapes = self.run, self.tapes
        reads = {v: self.stored[v] for v in run.boundaries}
        maps: Mapping[int, Boundary | Cotangent | Recalled] = (
            {i: self.stored[t.stored] for i, t in enumerate(run.program.targets) if t.stored is not None}
            if self.cotangents is None
            else self.cotangents
        )
        if all(kept.home.tier == "device" for kept in (*reads.values(), *maps.values())):
            return
        tiles: Sequence[tuple[Mapping[Value, Box], Owned]] = (
            [(tapes.boxes(owned), owned) for owned in tapes.owned()] if run.scans else outline(run.program, tapes.grid)
        )
        needed = largest([{**need, **self.first_pieces(need)} for need, _ in tiles])
        owned = largest([dict(enumerate(boxes)) for _, boxes in tiles])
        for v, boundary in reads.items():
            boundary.expect(needed.get(v, 0))
        for i, kept in maps.items():
            kept.expect(owned.get(i, 0))

    def first_pieces(self, need: Mapping[Value, Box]) -> dict[Value, Box]:
        """The first piece of each boundary that is read in pieces, than which none is larger."""
        run = self.run
        return {k: strip.boxes(need[k], run.plan.pieces)[0] for k, strip in run.strips.items() if k in need}

    # What the ledger counts

    def key(self, tensors: Sequence[Tensor], direction: str, *more: Hashable) -> Hashable | None:
        """Key of passes over tiles that hold the same, so that one of them is watched, or run in a rehearsal; None
        where each has to be. See [Note: watched] in `ledger`."""
        run = self.run
        if run.ledger is None or run.scans:
            return None
        about = self.same_inputs() if run.rehearsal is None else run.rehearsal.look(run.program)
        if about is None:
            return None
        plan = run.plan
        lie = tuple(t.stride() if t.dim() < 3 else strides_order(t) for t in tensors)
        where = tuple(read_from(v, self.stored.get(v)) for v in run.program.reads)
        decided = plan.tier, plan.half, plan.ahead, plan.drop > 0, plan.pieces, plan.alike
        return about, self.tapes.grid, decided, (run.alike, bool(run.known)), lie, where, direction, more

    def same_inputs(self) -> Hashable | None:
        """Strides of the images, where a pass over the tiles holds what another on the same tapes has held; else
        None."""
        run, ledger = self.run, self.run.ledger
        assert ledger is not None
        if not self.tapes.found.regular or ledger.allocator or ledger.thorough or run.alike or self.lasts:
            return None
        images = [image.tensor for image in run.sources.values()]
        return None if any(t is None for t in images) else tuple(strides_order(t) for t in images if t is not None)

    @contextmanager
    def counted(self, key: Hashable | None) -> Iterator[bool]:
        """A pass over the tiles: true if the ledger knows from another one what it holds."""
        run, ledger = self.run, self.run.ledger
        passes = self.tapes.found.passes if run.rehearsal is None else run.rehearsal.passes
        if ledger is None or key is None:
            yield False
        elif key in passes:
            ledger.expect(passes[key])
            self.watched = False
            yield True
        else:
            with ledger.measured() as most:
                yield False
            passes[key] = most.size

    def watching(self, owned: Owned) -> AbstractContextManager[None]:
        """A block of a tile, whose operators the ledger counts if this may be the worst of its kind until now."""
        ledger = self.run.ledger
        return self.counting(self.watched and ledger is not None and self.tapes.watch(owned, ledger.live))

    def counting(self, fresh: bool = True) -> AbstractContextManager[None]:
        """A block whose operators the ledger counts, if they are ``fresh`` or their results may outlive a tile."""
        ledger = self.run.ledger
        if ledger is None or ledger.allocator:
            return nullcontext()
        return watched(ledger if fresh or self.lasts else None)


def outline(program: Program, grid: Grid) -> list[tuple[Mapping[Value, Box], Owned]]:
    """Tiles among which are those of the longest boxes on every axis, each with all its boxes: what a box is on one
    axis depends on nothing but the tile's index there."""
    ends = program.ends(grid)
    axes = len(grid.counts)
    indices = {on_axis(i, axis, axes) for axis, count in enumerate(grid.counts) for i in telling(count)}
    tiles = [grid.owned(ends, index) for index in sorted(indices)]
    return [(program.boxes(owned), owned) for owned in tiles]


def largest(tiles: Sequence[Mapping[K, Box]]) -> dict[K, int]:
    """The positions of each map's largest tile, given some that are the longest on every axis."""
    extents: dict[K, list[tuple[int, ...]]] = {}
    for boxes in tiles:
        for key, box in boxes.items():
            extents.setdefault(key, []).append(box.extent)
    return {key: math.prod(map(max, zip(*found, strict=True))) for key, found in extents.items()}


def strides_order(t: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory, from the outermost."""
    return tuple(sorted(range(t.dim()), key=t.stride, reverse=True))


def read_from(v: Value, handle: Boundary | None) -> tuple[str, Any]:
    """The place that a pass over tiles reads a map from."""
    if handle is not None:
        return handle.home.tier, handle.half
    op = v.node.op if v.node is not None else None
    return (op.lies, (op.prefetches, op.together)) if isinstance(op, Source) else ("here", None)


def padding(program: Program, need: Mapping[Value, Box]) -> Iterator[tuple[int, ...]]:
    """Padding of a tile by each window."""
    for node in program.steps:
        if isinstance(node.op, TileOp) and node.outputs[0] in need:
            yield tuple(node.op.pads(need[node.outputs[0]]))


def lying(box: Box, extent: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    """A box's extents, and at which borders of its map it lies."""
    return tuple((hi - lo, lo == 0, hi == size) for (lo, hi), size in zip(box.intervals(), extent, strict=True))
