"""Cache of tile programs: boxes, kinds and tapes of a program's tiles on a grid, for the next recording.

[Note: findings] A step is recorded anew, and computes what the one before did: kinds, boxes and tapes of its tiles
depend on nothing but the program's structure and the grid. They are found once, and kept where the plans are. What may
have changed between two recordings is asked of the structure (`program.key`): everything that an operator, a
layout or a value has in it counts, types and flags too, and what cannot be compared for sure is not kept. Findings hold
no data and nothing of a graph, so they keep no recording alive.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.ledger import Ledger, unseen
from lightning_plugin.ops import TileOp
from lightning_plugin.program.compiled import OFTEN, Compiled, Compiler
from lightning_plugin.program.program import Program
from lightning_plugin.program.tape import Emit, Read, ScanTile, See, Tape, record

Interval = tuple[int, int]
#: The boxes of every target that a tile owns.
Owned = tuple[Box, ...]
#: So many steps of tapes are kept at most: some tens of megabytes.
MOST = 100_000
#: Their size is added up again when so many parts of them are new: a look takes as long as there are findings.
NEW = 8
#: The boxes that tiles own are kept of grids of so many tiles.
FEW = 1_000
NOTHING: Mapping[int, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Line:
    """One index of a grid on one axis: every map's interval there, by slot (None for one that was not needed), and what
    the index adds to a tile's kind."""

    held: Sequence[Interval | None]
    kind: int

    @cached_property
    def full(self) -> bool:
        """True if something is needed of every map."""
        return all(found is not None and found[0] < found[1] for found in self.held)


class Findings:
    """Lines, kinds and tapes of a program on a grid, by number."""

    def __init__(self, program: Program, grid: Grid) -> None:
        self.counts = grid.counts
        self.ends = program.ends(grid)
        self.places = [{lo: i for i, lo in enumerate(cuts)} for cuts in self.ends[0]]
        self.lines: dict[tuple[int, int], Line] = {}
        self.kinds: dict[Hashable, int] = {}
        self.tapes: dict[tuple[int, ...], Tape] = {}
        #: Those of a scan's tiles, by what each owns of every target.
        self.scans: dict[Owned, Tape] = {}
        #: Runs of a kind's tape, with grad or without, and its compiled form (None: it cannot be compiled).
        self.runs: Counter[tuple[tuple[int, ...], bool]] = Counter()
        self.compiled: dict[tuple[tuple[int, ...], bool], Compiled | None] = {}
        #: The bytes that passes over the tiles have held beyond what lay there; see [Note: watched] in `ledger`.
        self.passes: dict[Hashable, int] = {}
        self.tiles: tuple[Owned, ...] | None = None
        self.regular = self.is_regular(program)
        #: True if the next recording finds them again.
        self.lasting = False

    def is_regular(self, program: Program) -> bool:
        """True if all maps have the axes of the grid, and every tile a share in every target."""
        maps = [v for n in program.steps for v in (*n.maps, *(o for o in n.outputs if o.is_map))]
        return all(len(v.space.extent) == len(self.counts) for v in maps) and all(
            all(a < b for a, b in itertools.pairwise(cuts)) for axes in self.ends for cuts in axes
        )

    def across(self, program: Program, owned: Sequence[Box]) -> list[Line]:
        """A tile's index on every axis."""
        found = []
        for axis, lo in enumerate(owned[0].lo):
            index = self.places[axis][lo]
            if (axis, index) not in self.lines:
                self.look(program, index)
            found.append(self.lines[axis, index])
        return found

    def look(self, program: Program, index: int) -> None:
        """Find the boxes of the tile that has an index on every axis, or the last where there are fewer."""
        place = tuple(min(index, count - 1) for count in self.counts)
        owned = Grid.owned(self.ends, place)
        need = program.boxes(owned)
        found = list(lies(program, owned, need))
        for axis, i in enumerate(place):
            held = [(need[key].lo[axis], need[key].hi[axis]) if key in need else None for key in program.slots]
            kind = tuple(lying(found, axis))
            self.lines[axis, i] = Line(held, self.kinds.setdefault(kind, len(self.kinds)))

    def owned(self, program: Program, grid: Grid) -> Iterable[Owned]:
        """Boxes of every target that each tile owns; kept where tiles are few."""
        if grid.tiles > FEW:
            return program.owned(grid)
        if self.tiles is None:
            self.tiles = tuple(program.owned(grid))
        return self.tiles

    @property
    def size(self) -> int:
        """Number of steps of tapes it holds; lines and tiles count as much for each of their boxes."""
        steps = sum(len(tape.steps) for tape in (*self.tapes.values(), *self.scans.values()))
        boxes = sum(len(line.held) for line in self.lines.values()) + sum(map(len, self.tiles or ()))
        return steps + boxes


class Lie(NamedTuple):
    """Place of a tile of a map: the ``box`` of it that is held, and what of that a ``node`` reads or, where it is made,
    what is wanted of it; or None in place of both, where the tile has no share in it."""

    map: Value
    box: Box | None
    wanted: Box | None
    node: Node | None = None


def lies(program: Program, owned: Sequence[Box], need: Mapping[Value, Box]) -> Iterator[Lie]:
    """Places of the tiles of maps that a tile reads and makes, in the order of the steps."""
    reducing = {t.node.serial: box for t, box in zip(program.targets, owned, strict=True) if t.stored is None}
    for node in program.steps:
        out = reducing.get(node.serial) or need.get(node.outputs[0])
        if out is None:
            yield Lie(node.outputs[0], None, None)
            continue
        for v, wanted in zip(node.maps, node.op.need(out), strict=True):  # type: ignore[attr-defined]
            yield Lie(v, need[v], wanted)
        if isinstance(node.op, TileOp):
            yield Lie(node.outputs[0], out, out, node)
    for t, box in zip(program.targets, owned, strict=True):
        if t.stored is not None:
            yield Lie(t.stored, need[t.stored], box)


def lying(found: Iterable[Lie], axis: int) -> Sequence[Hashable]:
    """Relative places of the boxes of a tile on an axis, and the marks of operators there."""
    return [None if lie.box is None else along(lie, axis) for lie in found]


def along(lie: Lie, axis: int) -> Hashable:
    """Relative place of one box on an axis."""
    assert lie.box is not None and lie.wanted is not None
    lo, hi = lie.box.lo[axis], lie.box.hi[axis]
    if lie.node is not None:
        return hi - lo, lie.node.op.mark(axis, lo, hi)  # type: ignore[attr-defined]
    return hi - lo, lie.wanted.lo[axis] - lo, lie.wanted.hi[axis] - lo


class Library:
    """Findings by the structure they are of, the most recently used ones."""

    def __init__(self) -> None:
        self.findings: OrderedDict[Hashable, Findings] = OrderedDict()
        self._new = 0

    def __reduce__(self) -> tuple[type[Library], tuple[()]]:
        return Library, ()  # a copy, or another process, finds its own

    def of(self, program: Program, grid: Grid) -> Findings:
        """The findings of a program on a grid: those that are kept, or blank ones."""
        key = None if program.key is None else (program.key, grid)
        found = self.findings.get(key) if key is not None else None
        if found is None:
            found = Findings(program, grid)
            if key is not None and found.regular:
                found.lasting = True
                self.shorten()
                self.findings[key] = found
        else:
            self.findings.move_to_end(key)
        return found

    def shorten(self) -> None:
        """Let go what was not used for long."""
        self._new += 1
        if self._new * NEW < len(self.findings):
            return
        self._new = 0
        size = sum(found.size for found in self.findings.values())
        while size > MOST:
            _, gone = self.findings.popitem(last=False)
            size -= gone.size


class Tapes:
    """The tapes of a program on a grid, for one pass over its tiles.

    Attributes:
        program: The program.
        grid: The grid.
        scan: The tiles of a scan, by what each owns of every target; none where tiles are independent.
        compiler: Compiles tapes, if tiles are to be compiled.
        ledger: Counts what tiles hold; the operators of compiled tapes are not for it to see.
        see: Looks at results, if values that are not finite are looked for.
    """

    def __init__(
        self,
        program: Program,
        grid: Grid,
        library: Library,
        scan: Sequence[ScanTile] = (),
        compiler: Compiler | None = None,
        ledger: Ledger | None = None,
        see: See | None = None,
    ) -> None:
        self.program = program
        self.grid = grid
        self.found = library.of(program, grid)
        self.scan = {tile.owned: tile for tile in scan}
        self.compiler = compiler
        self.ledger = ledger
        self.see = see
        if compiler is not None and not self.found.lasting:
            compiler.refuse(program, "what they compute may be something else in the next step")
            self.compiler = None
        self.bound: dict[tuple[int, ...], Tape] = {}
        #: The most that was live when a tile of a kind began.
        self.beside: dict[tuple[int, ...], int] = {}

    def owned(self) -> Iterable[Owned]:
        """Boxes of every target that each tile owns."""
        return list(self.scan) or self.found.owned(self.program, self.grid)

    def watch(self, owned: Sequence[Box], live: int) -> bool:
        """True if a tile is to be watched: none of its kind was, in this pass, with as much that was live beside it.
        From then on this one counts as watched."""
        if self.scan or not self.found.regular:
            return True
        kind = tuple([line.kind for line in self.found.across(self.program, owned)])
        worse = live > self.beside.get(kind, -1)
        if worse:
            self.beside[kind] = live
        return worse

    def run(
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
        program = self.program
        if self.scan:
            return self.run_scanned(self.scan[owned], read, vectors, emit, grad, carried)
        if not self.found.regular:
            need = program.boxes(owned)
            given = [read(v, need[v]) for v in program.reads if v in need]
            record(program, owned, need).run(given, owned, vectors, emit, grad, self.seeing(owned))
            return {}
        lines = self.found.across(program, owned)
        kind = tuple([line.kind for line in lines])
        fresh = kind not in self.bound
        tape = self.tape(owned, kind)
        tiles = [read(program.reads[slot], Box.of(line.held[slot] for line in lines)) for slot in tape.reads]  # type: ignore[misc]
        compiled = None if self.compiler is None or fresh else self.compiled(kind, tape, tiles, vectors, grad)
        if compiled is None:
            tape.run(tiles, owned, vectors, emit, grad, self.seeing(owned))
        else:
            compiled(owned, emit)
        return {}

    def run_scanned(
        self,
        tile: ScanTile,
        read: Read,
        vectors: Sequence[Any],
        emit: Emit,
        grad: bool,
        carried: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """Evaluate a tile of a scan, whose tape emits the rows that it hands on as further targets."""
        program, handed = self.program, dict[int, Tensor]()
        serials = [t.node.serial for t in program.targets] + list(tile.kept)

        def take(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            if i < len(program.targets):
                emit(i, box, tiles)
            else:  # without grad a copy, or the rows that are handed on would hold the whole tile in memory
                handed[serials[i]] = tiles[0] if grad else tiles[0].clone()

        given = [read(v, tile.reads[v]) for v in program.reads if v in tile.reads]
        given += [carried[serial] for serial in tile.carried]
        owned = (*tile.owned, *tile.kept.values())
        self.of_scan(tile).run(given, owned, vectors, take, grad, self.seeing(tile.owned))
        return handed

    def seeing(self, owned: Sequence[Box]) -> Callable[[int, Tensor], None] | None:
        """Observer of a tile's results, by the places of their operators; None where there is none."""
        see, steps = self.see, self.program.steps
        return None if see is None else lambda place, tile: see(steps[place], tile, owned)

    def compiled(
        self, kind: tuple[int, ...], tape: Tape, tiles: list[Any], vectors: Sequence[Any], grad: bool
    ) -> Callable[[Sequence[Box], Emit], None] | None:
        """Run a compiled tape on a tile: its results, to be handed on, or None where it is not compiled yet. See
        [Note: compiled] in `compiled`."""
        found, compiler = self.found, self.compiler
        assert compiler is not None
        found.runs[kind, grad] += 1
        if found.runs[kind, grad] < OFTEN or not all(isinstance(tile, Tensor) for tile in tiles):
            return None
        with unseen(self.ledger):
            if (kind, grad) not in found.compiled:
                found.compiled[kind, grad] = compiler.make(tape, self.program, tiles, vectors, grad)
            compiled = found.compiled[kind, grad]
            if compiled is None:
                return None
            outputs = compiler.call(compiled, tiles, vectors, grad)
        tiles.clear()
        if self.ledger is not None:
            for tensor in outputs:
                self.ledger.see(tensor)
        return partial(compiled.give, outputs, vectors)

    def tape(self, owned: Sequence[Box], kind: tuple[int, ...]) -> Tape:
        """The tape of a kind, of which a tile is given, bound to this pass's program."""
        tape = self.bound.get(kind)
        if tape is None:
            found = self.found.tapes.get(kind)
            if found is None:
                tape = self.found.tapes[kind] = record(self.program, owned, self.program.boxes(owned))
            else:
                tape = found.bound(self.program)
            self.bound[kind] = tape
        return tape

    def of_scan(self, tile: ScanTile) -> Tape:
        """The tape of a scan's tile, bound to this pass's program."""
        found = self.found.scans.get(tile.owned)
        if found is None:
            found = self.found.scans[tile.owned] = record(self.program, tile.owned, tile.boxes(self.program), tile)
            return found
        return found.bound(self.program)

    def boxes(self, owned: Owned) -> dict[Value, Box]:
        """The boxes of all maps that a tile holds: `Program.boxes`, put together from what is known of its lines. Of a
        scan's tile, the boxes that it reads."""
        if self.scan:
            return dict(self.scan[owned].reads)
        across = self.found.across(self.program, owned) if self.found.regular else []
        if not across or not all(line.full for line in across):
            return self.program.boxes(owned)
        return {
            key: Box.of(line.held[slot] for line in across)  # type: ignore[misc]
            for key, slot in self.program.slots.items()
        }
