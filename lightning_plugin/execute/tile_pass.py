"""A tile pass: one direction of a segment over all its tiles, in order, with the preparations for each tile.

A pass goes over a grid, whose tiles are independent, or over a scan, whose tiles hand rows on: in order in forward, in
reverse in backward. Identical tiles are evaluated once ([Note: identical tiles]). Several ranks share the tiles of a
grid. A rehearsal evaluates a few representative tiles.

`Forward` and `Backward` evaluate the tiles; their order is decided here.

[Note: identical tiles] Most of a slide is background of one value. Two tiles are *identical* if all their inputs are
equal (constant with the same values, or made by one computation), and all their boxes have the same extents, touch the
same borders and are padded alike (a window wider than a tile has another padding in each tile near the border): then
they are the same computation. Tiles of one kind ([Note: tapes] in `program.tape`) need not be, since the kind also
depends on positions between the pixels of a map that is enlarged. Forward computes one of the identical tiles, writes
it to the boxes of all, and merges its share of each reduction once for each tile. When a stored map is written, its
constant parts are noted ([Note: background] in `constants`), and which of its tiles one computation has made: kernels
do not give all positions of a constant tile the same last bits. So the next segment finds identical tiles in it too.

Backward is linear in the cotangents: one evaluation, pulled back with the sum of the tiles' cotangents, gives the sum
of their parameter gradients. If an input needs a gradient, each tile has its own gradient, and is evaluated by itself,
except tiles with equal cotangents, whose gradients are equal too. So a first segment over images, and segments behind a
frozen trunk, share backward; the others share forward, and backward for equal cotangents. This halves the time of the
attribution of a pooled score if nine tenths of the image are background.

All operators have to depend on nothing but their tiles' values (`Op.uniform`): a dropout mask or the index of a maximum
depends on a tile's position, so that a segment with such an operator computes each tile. Tiles whose shares of a
reduction belong to different slices of it (those of two images, in a pool over each) are computed each, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from lightning_plugin.boxes import Box, Grid, index_on_axis, representative_indices
from lightning_plugin.execute.gradients import RecalledCotangent
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
NO_ROWS: Mapping[int, Tensor] = {}


class TilePass:
    """The tiles of a segment's program on a grid.

    Attributes:
        segment: The segment.
        stored: The boundaries that tiles read and, in forward, write.
        cotangents: The cotangents that tiles read, by the place of the target; None in forward.
        scan_tiles: The tiles of a scan, by the boxes of the targets that each owns; empty for a grid.
        findings: Tiles and tapes that this pass, or an earlier one, has found.
        tapes: The tapes that have run in this pass, bound to its recording, by kind.
        must_watch: True if the memory of the pass is not known yet; see [Note: watched] in `ledger`.
        overlaps: True if tensors of a tile may be live when the next begins.
        live_at_start: Most bytes that were live when a watched tile of a kind began.
    """

    def __init__(
        self,
        segment: SegmentRun,
        grid: Grid,
        stored: Mapping[Value, Boundary],
        cotangents: Mapping[int, Cotangent | RecalledCotangent] | None = None,
    ) -> None:
        program, compiler, scans = segment.program, segment.step.compiler, segment.scans
        self.segment = segment
        self.grid = grid
        self.stored = stored  # no copy: the frame of a failed run clears it
        self.cotangents = cotangents
        self.scan_tiles = {tile.owned: tile for tile in scan_tiles(program, grid)} if scans else {}
        self.findings = segment.step.library.find(program, grid, scans)
        takes = compiler is not None and compiler.can_compile(program, scans, self.findings.lasting)
        self.compiler = compiler if takes else None
        self.must_watch = True
        self.overlaps = bool(segment.plan.ahead or segment.team is not None or program.prefetched)
        self.tapes: dict[Hashable, Tape] = {}
        self.live_at_start: dict[Hashable, int] = {}

    # The tiles, in order

    def __iter__(self) -> Iterator[Tiles]:
        """Iterate over the tiles that this process evaluates, each with those identical to it."""
        work, team = self.all_tiles(), self.segment.team
        return self.prefetching(filter(self.is_needed, work) if team is None else team.own_share(work))

    def is_needed(self, tiles: Tiles) -> bool:
        """True unless the segment's results are known not to need these tiles, which are reported as done."""
        segment = self.segment
        if self.cotangents is not None or segment.rehearsal is not None or segment.scans:
            return True
        for i, target in enumerate(segment.program.targets):
            if target.stored is not None or any(target.op.needs_tile(t[i]) for t in tiles if not t[i].empty):
                return True
        segment.step.report_tiles(len(tiles))
        return False

    def all_tiles(self) -> Iterator[Tiles]:
        """Iterate over the tiles of all ranks, each with those identical to it."""
        segment, grid = self.segment, self.grid
        if self.scan_tiles:
            return ([owned] for owned in (self.scan_tiles if self.cotangents is None else reversed(self.scan_tiles)))
        ahead = segment.plan.ahead or bool(segment.program.prefetched)
        found = self.all_owned() if segment.rehearsal is None else segment.rehearsal.tiles(segment.program, grid, ahead)
        if not segment.groups_tiles:
            return ([owned] for owned in found)
        tiles, grouped = list(found), segment.tile_groups if segment.rehearsal is None else {}
        if grid not in grouped:
            grouped[grid] = self.group_identical(tiles)
        return ([tiles[place] for place in places] for places in grouped[grid])

    def all_owned(self) -> Iterable[Owned]:
        """Iterate over the tiles: the boxes of all targets that each owns."""
        return self.scan_tiles or self.findings.all_owned(self.segment.program, self.grid)

    # Identical tiles

    def group_identical(self, tiles: Sequence[Owned]) -> list[list[int]]:
        """Group the places of identical tiles, in the order of the grid."""
        found: dict[object, list[int]] = {}
        for place, owned in enumerate(tiles):
            key = self.tile_key(owned)
            found.setdefault(place if key is None else key, []).append(place)
        return list(found.values())

    def tile_key(self, owned: Owned) -> object | None:
        """Return a key that is equal for identical tiles; None for a tile that is like no other."""
        program = self.segment.program
        contents = []
        for v, box in self.reads(owned).items():
            key = self.content_key(v, box)
            if key is None:
                return None
            contents.append(key)
        need = program.boxes(owned)
        lands = tuple(
            t.op.result_slice(box)
            for t, box in zip(program.targets, owned, strict=True)
            if t.stored is None and not box.empty
        )
        shapes = [extents_and_borders(box, t.map.space.extent) for t, box in zip(program.targets, owned, strict=True)]
        shapes += [extents_and_borders(box, v.space.extent) for v, box in need.items()]
        return tuple(contents), tuple(shapes), tuple(paddings(program, need)), lands

    def content_key(self, v: Value, box: Box) -> Hashable | None:
        """Return the key of the contents of an input's box: of its constant, or of the computation that made it. None
        for a box that is like no other."""
        found, segment = self.stored.get(v), self.segment
        if found is None and v in segment.sources:
            return segment.sources[v].constant_key(box)
        if found is None:
            return segment.known_constants[v].key_of_box(box)
        key = None if found.constants is None else found.constants.key_of_box(box)
        return key if key is not None or found.numbered is None else found.numbered.signature(box)

    # One tile

    def find_tile(self, owned: Owned) -> FoundTile:
        """Find the kind of a tile, and the boxes of its inputs."""
        found = self.findings.tiles.get(owned)
        if found is not None:
            return found
        program = self.segment.program
        if owned in self.scan_tiles:  # each tile of a scan is a kind of its own
            reads = self.scan_tiles[owned].reads
            return self.findings.store(owned, owned, [reads.get(v) for v in program.reads])
        return self.findings.tile(program, owned)

    def reads(self, owned: Owned) -> dict[Value, Box]:
        """Return the boxes of the maps that a tile reads."""
        found = zip(self.segment.program.reads, self.find_tile(owned).reads, strict=True)
        return {v: box for v, box in found if box is not None}

    def evaluate(
        self,
        owned: Owned,
        read: Read,
        vectors: Sequence[Any],
        emit: Emit,
        grad: bool,
        carried: Mapping[int, Tensor] = NO_ROWS,
    ) -> dict[int, Tensor]:
        """Evaluate a tile; see `Tape.run`.

        Args:
            owned: The tile.
            read: Reads an input's box.
            vectors: The vectors of the program.
            emit: Called with each target's results.
            grad: Evaluate with grad.
            carried: In a scan, the rows that the tile before handed on, by the serial number of their node.

        Returns:
            The rows that a tile of a scan hands on, likewise.
        """
        program, kind = self.segment.program, self.find_tile(owned).kind
        known = kind in self.tapes  # the ledger sees the operators of the first
        tape = self.tape(owned, kind)
        tiles = [read(v, box) for v, box in self.reads(owned).items()]
        if self.compiler is not None and known:
            compiled = self.findings.compiled, kind, tape, program, tiles, vectors, grad, self.segment.ledger
            give = self.compiler.run(*compiled)
            if give is not None:
                give(owned, emit)
                return {}
        if owned not in self.scan_tiles:
            tape.run(tiles, owned, vectors, emit, grad, self.observer(owned))
            return {}
        scanned, handed, targets = self.scan_tiles[owned], dict[int, Tensor](), len(program.targets)
        kept = list(scanned.kept)

        def take(i: int, box: Box, made: Sequence[Tensor]) -> None:
            if i < targets:
                emit(i, box, made)
            else:  # without grad a copy: a view would keep the whole tile in memory
                handed[kept[i - targets]] = made[0] if grad else made[0].clone()

        tiles += [carried[serial] for serial in scanned.carried]
        tape.run(tiles, (*owned, *scanned.kept.values()), vectors, take, grad, self.observer(owned))
        return handed

    def tape(self, owned: Owned, kind: Hashable) -> Tape:
        """Return the tape of a kind, bound to this pass's recording; make it from a tile of the kind if needed."""
        tape = self.tapes.get(kind)
        if tape is None:
            program, found, scanned = self.segment.program, self.findings.tapes.get(kind), self.scan_tiles.get(owned)
            if found is not None:
                tape = found.rebound(program)
            else:
                need = program.boxes(owned) if scanned is None else scanned.boxes(program)
                tape = self.findings.tapes[kind] = make_tape(program, owned, need, scanned)
            self.tapes[kind] = tape
        return tape

    def observer(self, owned: Owned) -> Callable[[int, Tensor], None] | None:
        """Return the observer of a tile's results, called with the place of the operator; None if there is none."""
        observe, nodes = self.segment.observe, self.segment.program.nodes
        return None if observe is None else lambda place, tile: observe(nodes[place], tile, owned)

    # Before a tile

    def prefetching(self, work: Iterator[Tiles]) -> Iterator[Tiles]:
        """Iterate over tiles, and before each prefetch the next: from sources that can, and from lower tiers if the
        segment transfers ahead."""
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
                with self.watch():
                    for v in sources:
                        if v in need:
                            segment.sources[v].prefetch(need[v])
                    if segment.plan.ahead:
                        self.prefetch(need, after[0])
            yield now
            now = after

    def prefetch(self, need: Mapping[Value, Box], owned: Owned) -> None:
        """Start to read a tile's boundaries and cotangents from lower tiers."""
        for v in self.segment.boundaries:
            if v in need and v not in self.segment.uncut_axes:
                self.stored[v].prefetch(need[v])
        for i, cotangent in (self.cotangents or {}).items():
            if not owned[i].empty:
                cotangent.prefetch(owned[i])

    def set_largest_tiles(self) -> None:
        """Tell maps on lower tiers, before the first tile, how large their tiles are."""
        segment = self.segment
        reads = {v: self.stored[v] for v in segment.boundaries}
        maps: Mapping[int, Boundary | Cotangent | RecalledCotangent] = (
            {i: self.stored[t.stored] for i, t in enumerate(segment.program.targets) if t.stored is not None}
            if self.cotangents is None
            else self.cotangents
        )
        if all(kept.home.tier == "device" for kept in (*reads.values(), *maps.values())):
            return
        tiles: Sequence[tuple[Mapping[Value, Box], Owned]] = (
            [(self.reads(owned), owned) for owned in self.scan_tiles]
            if self.scan_tiles
            else extreme_tiles(segment.program, self.grid)
        )
        needed = largest_positions([{**need, **self.first_pieces(need)} for need, _ in tiles])
        owned = largest_positions([dict(enumerate(boxes)) for _, boxes in tiles])
        for v, boundary in reads.items():
            boundary.set_largest_tile(needed.get(v, 0))
        for i, kept in maps.items():
            kept.set_largest_tile(owned.get(i, 0))

    def first_pieces(self, need: Mapping[Value, Box]) -> dict[Value, Box]:
        """Return the first piece, the largest, of each boundary that is read in pieces."""
        segment = self.segment
        return {v: axis.boxes(need[v], segment.plan.pieces)[0] for v, axis in segment.uncut_axes.items() if v in need}

    # What the ledger counts

    def memory_key(self, tensors: Sequence[Tensor], direction: str, *more: Hashable) -> Hashable | None:
        """Return a key that is equal for passes on the same tapes that hold the same bytes, so that one of them is
        watched, or run in a rehearsal. None if each has to be. See [Note: watched] in `ledger`."""
        segment, plan, ledger = self.segment, self.segment.plan, self.segment.ledger
        if ledger is None or segment.scans:
            return None
        images = [image.tensor for image in segment.sources.values()]
        is_unpredictable = ledger.uses_allocator or ledger.watch_all or segment.groups_tiles or self.overlaps
        if segment.rehearsal is None and (is_unpredictable or any(t is None for t in images)):
            return None
        strides = tuple(t.stride() if t.dim() < 3 else strides_order(t) for t in tensors)
        strides += tuple(strides_order(t) for t in images if t is not None)
        locations = tuple(location_of(v, self.stored.get(v)) for v in segment.program.reads)
        decisions = plan.tier, plan.half, plan.ahead, plan.drop > 0, plan.pieces, plan.alike
        return decisions, (segment.groups_tiles, bool(segment.known_constants)), strides, locations, direction, more

    @contextmanager
    def count_memory(self, key: Hashable | None) -> Iterator[bool]:
        """Measure the bytes of a block that goes over the tiles; yield True if they are known from an equal pass."""
        ledger, passes = self.segment.ledger, self.findings.pass_bytes
        if ledger is None or key is None:
            yield False
        elif key in passes:
            ledger.add_unwatched(passes[key])
            self.must_watch = False
            yield True
        else:
            with ledger.measure() as peak:
                yield False
            passes[key] = peak.bytes

    def watch_tile(self, owned: Owned) -> AbstractContextManager[None]:
        """Return a context for a tile; the ledger watches it if more is live than before other tiles of its kind."""
        ledger, kind = self.segment.ledger, self.find_tile(owned).kind
        worse = self.must_watch and ledger is not None and ledger.live > self.live_at_start.get(kind, -1)
        if worse:
            self.live_at_start[kind] = ledger.live  # type: ignore[union-attr]
        return self.watch(worse)

    def watch(self, fresh: bool = True) -> AbstractContextManager[None]:
        """Return a context that the ledger watches if the tile is ``fresh`` or its tensors may outlive it."""
        ledger = self.segment.ledger
        if ledger is None or ledger.uses_allocator:
            return nullcontext()
        return watched(ledger if fresh or self.overlaps else None)


def extreme_tiles(program: Program, grid: Grid) -> list[tuple[Mapping[Value, Box], Owned]]:
    """Return tiles with the longest boxes along every axis, each with (boxes of all maps, boxes of targets): a box's
    interval on an axis depends on the tile's index there only."""
    ends = program.cuts(grid)
    axes = len(grid.counts)
    indices = {
        index_on_axis(i, axis, axes) for axis, count in enumerate(grid.counts) for i in representative_indices(count)
    }
    tiles = [grid.owned(ends, index) for index in sorted(indices)]
    return [(program.boxes(owned), owned) for owned in tiles]


def largest_positions(tiles: Sequence[Mapping[K, Box]]) -> dict[K, int]:
    """Return the positions of each map's largest tile, given tiles with the longest boxes along every axis."""
    extents: dict[K, list[tuple[int, ...]]] = {}
    for boxes in tiles:
        for key, box in boxes.items():
            extents.setdefault(key, []).append(box.extent)
    return {key: math.prod(map(max, zip(*found, strict=True))) for key, found in extents.items()}


def strides_order(t: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in memory order, outermost first."""
    return tuple(sorted(range(t.dim()), key=t.stride, reverse=True))


def location_of(v: Value, boundary: Boundary | None) -> tuple[str, Any]:
    """Return the kind of memory that a tile pass reads a map from."""
    if boundary is not None:
        return boundary.home.tier, boundary.half
    op = v.node.op if v.node is not None else None
    return (op.location, (op.prefetches, op.reads_all_images)) if isinstance(op, Source) else ("here", None)


def paddings(program: Program, need: Mapping[Value, Box]) -> Iterator[tuple[int, ...]]:
    """Iterate over the paddings of a tile by each window."""
    for node in program.nodes:
        if isinstance(node.op, TileOp) and node.outputs[0] in need:
            yield tuple(node.op.tile_padding(need[node.outputs[0]]))


def extents_and_borders(box: Box, extent: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    """Return a box's extent along each axis, and if it touches the lower and the upper border of its map."""
    return tuple((hi - lo, lo == 0, hi == size) for (lo, hi), size in zip(box.intervals(), extent, strict=True))
