"""One direction of a segment, over all its tiles: their order, and the preparations for each.

A pass goes over a grid, whose tiles are independent, or over a scan, whose tiles hand rows on: in order forward, in
reverse backward. Of identical tiles one stands for all ([Note: identical tiles]). Several ranks share the tiles of a
grid. A rehearsal has a few that stand for all.

`Forward` and `Backward` say what becomes of a tile. Neither knows in which order tiles come.

[Note: identical tiles] Most of a slide is background of one value. Two tiles are *identical* when all they read is the
same (constant, with the same values; or made by one computation), and all their boxes have the same extents, lie at the
same borders and are padded alike (a window wider than a tile is padded by another length in each tile near the border):
then they are the same computation. That is less than being of one kind ([Note: tapes] in `program.tape`), where tiles
lie between the pixels of what they enlarge. Forward computes one of them, writes it to all of their places and merges
its share of each reduction as often as there are tiles. Where a stored map comes out constant is noted when it is
written ([Note: background] in `constants`), and so is which of its tiles one computation has made: kernels do not give
all positions of a constant tile the same last bits. So the next segment finds identical tiles in it too.

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from lightning_plugin.boxes import Box, Grid, on_axis, representative_indices
from lightning_plugin.execute.gradients import Recalled
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.graph import Value
from lightning_plugin.ledger import watched
from lightning_plugin.ops import Source, TileOp
from lightning_plugin.program.findings import FoundTile, Owned
from lightning_plugin.program.program import Program
from lightning_plugin.program.scan import scan_tiles
from lightning_plugin.program.tape import Emit, Read, Tape, make_tape
from lightning_plugin.residency.boundary import Boundary, Cotangent

K = TypeVar("K", bound=Hashable)
#: A tile, and those that are identical to it.
Tiles = Sequence[Owned]
NOTHING: Mapping[int, Tensor] = {}


class TilePass:
    """The tiles of a segment's program on a grid.

    Attributes:
        segment: The segment.
        stored: The boundaries that tiles read and, in forward, write.
        cotangents: The cotangents that they read, by the place of the target; None in forward.
        scan: The tiles of a scan, by what each owns of every target; none where tiles are independent.
        found: Tiles and tapes that this pass, or an earlier one, has found.
        watched: True if nothing is known yet of what the pass holds; see [Note: watched] in `ledger`.
        lasts: True if something of a tile may be there when the next begins.
    """

    def __init__(
        self,
        segment: SegmentRun,
        grid: Grid,
        stored: Mapping[Value, Boundary],
        cotangents: Mapping[int, Cotangent | Recalled] | None = None,
    ) -> None:
        program, compiler, scans = segment.program, segment.step.compiler, segment.scans
        self.segment = segment
        self.grid = grid
        self.stored = stored  # no copy: the maps of a run that has failed go with its frame
        self.cotangents = cotangents
        self.scan = {tile.owned: tile for tile in scan_tiles(program, grid)} if scans else {}
        self.found = segment.step.library.find(program, grid, scans)
        takes = compiler is not None and compiler.can_compile(program, scans, self.found.lasting)
        self.compiler = compiler if takes else None
        self.watched = True
        self.lasts = bool(segment.plan.ahead or segment.team is not None or program.prefetched)
        #: The tapes that have run in this pass, bound to its recording.
        self.bound: dict[Hashable, Tape] = {}
        #: The most that was live when a tile of a kind began.
        self.beside: dict[Hashable, int] = {}

    # The tiles, in order

    def __iter__(self) -> Iterator[Tiles]:
        """The tiles that this process evaluates, each with those that are identical to it."""
        work, team = self.work(), self.segment.team
        return self.announced(work if team is None else team.own_share(work))

    def work(self) -> Iterator[Tiles]:
        """The tiles of all ranks, each with those that are identical to it."""
        segment, grid = self.segment, self.grid
        if self.scan:
            return ([owned] for owned in (self.scan if self.cotangents is None else reversed(self.scan)))
        ahead = segment.plan.ahead or bool(segment.program.prefetched)
        found = self.owned() if segment.rehearsal is None else segment.rehearsal.tiles(segment.program, grid, ahead)
        if not segment.alike:
            return ([owned] for owned in found)
        tiles, grouped = list(found), segment.grouped if segment.rehearsal is None else {}
        if grid not in grouped:
            grouped[grid] = self.groups(tiles)
        return ([tiles[place] for place in places] for places in grouped[grid])

    def owned(self) -> Iterable[Owned]:
        """The boxes of every target that each tile owns."""
        return self.scan or self.found.all_owned(self.segment.program, self.grid)

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
        program = self.segment.program
        contents = []
        for v, box in self.reads(owned).items():
            key = self.content(v, box)
            if key is None:
                return None
            contents.append(key)
        need = program.boxes(owned)
        lands = tuple(
            t.op.lands(box) for t, box in zip(program.targets, owned, strict=True) if t.stored is None and not box.empty
        )
        lie = [lying(box, t.map.space.extent) for t, box in zip(program.targets, owned, strict=True)]
        lie += [lying(box, v.space.extent) for v, box in need.items()]
        return tuple(contents), tuple(lie), tuple(padding(program, need)), lands

    def content(self, v: Value, box: Box) -> Hashable | None:
        """Key of the contents of a box that is read: equal contents are those of a constant, or made by one
        computation. None where the box is like no other."""
        found, segment = self.stored.get(v), self.segment
        if found is None:
            return segment.sources[v].constant_key(box) if v in segment.sources else segment.known[v].at(box)
        key = None if found.constants is None else found.constants.at(box)
        return key if key is not None or found.numbered is None else found.numbered.signature(box)

    # One tile

    def tile(self, owned: Owned) -> FoundTile:
        """The kind of a tile, and its boxes of what it reads."""
        found = self.found.tiles.get(owned)
        if found is not None:
            return found
        program = self.segment.program
        if owned in self.scan:  # each is of a kind of its own
            reads = self.scan[owned].reads
            return self.found.store(owned, owned, [reads.get(v) for v in program.reads])
        return self.found.tile(program, owned)

    def reads(self, owned: Owned) -> dict[Value, Box]:
        """The boxes of the maps that a tile reads."""
        found = zip(self.segment.program.reads, self.tile(owned).reads, strict=True)
        return {v: box for v, box in found if box is not None}

    def evaluate(
        self,
        owned: Owned,
        read: Read,
        vectors: Sequence[Any],
        emit: Emit,
        grad: bool,
        carried: Mapping[int, Tensor] = NOTHING,
    ) -> dict[int, Tensor]:
        """Evaluate a tile; see `Tape.run`. A scan's tile is given the rows that the one before handed on (``carried``);
        those that it hands on itself are returned. Both are by the serial of the node that makes the map."""
        program, kind = self.segment.program, self.tile(owned).kind
        known = kind in self.bound  # the ledger sees the operators of the first
        tape = self.tape(owned, kind)
        tiles = [read(v, box) for v, box in self.reads(owned).items()]
        if self.compiler is not None and known:
            compiled = self.found.compiled, kind, tape, program, tiles, vectors, grad, self.segment.ledger
            give = self.compiler.run(*compiled)
            if give is not None:
                give(owned, emit)
                return {}
        if owned not in self.scan:
            tape.run(tiles, owned, vectors, emit, grad, self.seeing(owned))
            return {}
        scanned, handed, targets = self.scan[owned], dict[int, Tensor](), len(program.targets)
        kept = list(scanned.kept)

        def take(i: int, box: Box, made: Sequence[Tensor]) -> None:
            if i < targets:
                emit(i, box, made)
            else:  # without grad a copy, or the rows that are handed on would hold the whole tile in memory
                handed[kept[i - targets]] = made[0] if grad else made[0].clone()

        tiles += [carried[serial] for serial in scanned.carried]
        tape.run(tiles, (*owned, *scanned.kept.values()), vectors, take, grad, self.seeing(owned))
        return handed

    def tape(self, owned: Owned, kind: Hashable) -> Tape:
        """The tape of a kind, of which a tile is given, bound to this pass's recording."""
        tape = self.bound.get(kind)
        if tape is None:
            program, found, scanned = self.segment.program, self.found.tapes.get(kind), self.scan.get(owned)
            if found is not None:
                tape = found.rebound(program)
            else:
                need = program.boxes(owned) if scanned is None else scanned.boxes(program)
                tape = self.found.tapes[kind] = make_tape(program, owned, need, scanned)
            self.bound[kind] = tape
        return tape

    def seeing(self, owned: Owned) -> Callable[[int, Tensor], None] | None:
        """Observer of a tile's results, by the places of their operators; None where there is none."""
        see, steps = self.segment.see, self.segment.program.nodes
        return None if see is None else lambda place, tile: see(steps[place], tile, owned)

    # Before a tile

    def announced(self, work: Iterator[Tiles]) -> Iterator[Tiles]:
        """The same tiles; while one is computed, the next is announced: to sources that can prefetch, and to lower
        tiers if the segment transfers ahead."""
        segment = self.segment
        sources = [] if segment.scans else segment.program.prefetched
        if segment.scans or not (sources or segment.plan.ahead):
            yield from work
            return
        now = next(work, None)
        while now is not None:
            after = next(work, None)
            if after is not None:
                need = self.reads(after[0])
                with self.counting():
                    for v in sources:
                        if v in need:
                            segment.sources[v].prefetch(need[v])
                    if segment.plan.ahead:
                        self.fetch(need, after[0])
            yield now
            now = after

    def fetch(self, need: Mapping[Value, Box], owned: Owned) -> None:
        """Begin to read a tile's part of boundaries and cotangents from lower tiers."""
        for v in self.segment.boundaries:
            if v in need and v not in self.segment.strips:
                self.stored[v].prefetch(need[v])
        for i, cotangent in (self.cotangents or {}).items():
            if not owned[i].empty:
                cotangent.prefetch(owned[i])

    def expect(self) -> None:
        """Let maps on lower tiers know of the largest tiles to come, before the first."""
        segment = self.segment
        reads = {v: self.stored[v] for v in segment.boundaries}
        maps: Mapping[int, Boundary | Cotangent | Recalled] = (
            {i: self.stored[t.stored] for i, t in enumerate(segment.program.targets) if t.stored is not None}
            if self.cotangents is None
            else self.cotangents
        )
        if all(kept.home.tier == "device" for kept in (*reads.values(), *maps.values())):
            return
        tiles: Sequence[tuple[Mapping[Value, Box], Owned]] = (
            [(self.reads(owned), owned) for owned in self.scan] if self.scan else outline(segment.program, self.grid)
        )
        needed = largest([{**need, **self.first_pieces(need)} for need, _ in tiles])
        owned = largest([dict(enumerate(boxes)) for _, boxes in tiles])
        for v, boundary in reads.items():
            boundary.set_largest_tile(needed.get(v, 0))
        for i, kept in maps.items():
            kept.set_largest_tile(owned.get(i, 0))

    def first_pieces(self, need: Mapping[Value, Box]) -> dict[Value, Box]:
        """The first piece of each boundary that is read in pieces, than which none is larger."""
        segment = self.segment
        return {k: strip.boxes(need[k], segment.plan.pieces)[0] for k, strip in segment.strips.items() if k in need}

    # What the ledger counts

    def key(self, tensors: Sequence[Tensor], direction: str, *more: Hashable) -> Hashable | None:
        """Key of passes on the same tapes that hold the same, so that one of them is watched, or run in a rehearsal;
        None where each has to be. See [Note: watched] in `ledger`."""
        segment, plan, ledger = self.segment, self.segment.plan, self.segment.ledger
        if ledger is None or segment.scans:
            return None
        images = [image.tensor for image in segment.sources.values()]
        differs = ledger.uses_allocator or ledger.watch_all or segment.alike or self.lasts
        if segment.rehearsal is None and (differs or any(t is None for t in images)):
            return None
        lie = tuple(t.stride() if t.dim() < 3 else strides_order(t) for t in tensors)
        lie += tuple(strides_order(t) for t in images if t is not None)
        where = tuple(read_from(v, self.stored.get(v)) for v in segment.program.reads)
        decided = plan.tier, plan.half, plan.ahead, plan.drop > 0, plan.pieces, plan.alike
        return decided, (segment.alike, bool(segment.known)), lie, where, direction, more

    @contextmanager
    def counted(self, key: Hashable | None) -> Iterator[bool]:
        """A pass over the tiles: true if the ledger knows from another one what it holds."""
        ledger, passes = self.segment.ledger, self.found.pass_bytes
        if ledger is None or key is None:
            yield False
        elif key in passes:
            ledger.add_unwatched(passes[key])
            self.watched = False
            yield True
        else:
            with ledger.measure() as most:
                yield False
            passes[key] = most.bytes

    def watching(self, owned: Owned) -> AbstractContextManager[None]:
        """A block of a tile, whose operators the ledger counts if this may be the worst of its kind until now."""
        ledger, kind = self.segment.ledger, self.tile(owned).kind
        worse = self.watched and ledger is not None and ledger.live > self.beside.get(kind, -1)
        if worse:
            self.beside[kind] = ledger.live  # type: ignore[union-attr]
        return self.counting(worse)

    def counting(self, fresh: bool = True) -> AbstractContextManager[None]:
        """A block whose operators the ledger counts, if they are ``fresh`` or their results may outlive a tile."""
        ledger = self.segment.ledger
        if ledger is None or ledger.uses_allocator:
            return nullcontext()
        return watched(ledger if fresh or self.lasts else None)


def outline(program: Program, grid: Grid) -> list[tuple[Mapping[Value, Box], Owned]]:
    """Tiles among which are those of the longest boxes on every axis, each with all its boxes: what a box is on one
    axis depends on nothing but the tile's index there."""
    ends = program.cuts(grid)
    axes = len(grid.counts)
    indices = {on_axis(i, axis, axes) for axis, count in enumerate(grid.counts) for i in representative_indices(count)}
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
    for node in program.nodes:
        if isinstance(node.op, TileOp) and node.outputs[0] in need:
            yield tuple(node.op.pads(need[node.outputs[0]]))


def lying(box: Box, extent: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    """A box's extents, and at which borders of its map it lies."""
    return tuple((hi - lo, lo == 0, hi == size) for (lo, hi), size in zip(box.intervals(), extent, strict=True))
