"""Cache of tile programs: boxes, kinds and tapes of a program's tiles on a grid, for the next recording.

[Note: findings] A step may be recorded anew though it computes what others did. Kinds, boxes and tapes of a step's
tiles depend on the program's structure and the grid alone, so they are cached by a key of both. The structural key
(`program.key`) covers every field of operators, layouts and values, with types and flags; a program with a field that
cannot be compared exactly is not cached. Findings hold no data and no nodes, so they keep no recording alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.graph import Value
from lightning_plugin.ops import ReduceOp, TileOp
from lightning_plugin.program.compiled import CompiledTapes
from lightning_plugin.program.program import Program
from lightning_plugin.program.tape import Tape

#: Boxes that a tile owns, one for each target.
Owned = tuple[Box, ...]
#: Instructions and boxes above which a library evicts findings: a hundred megabytes at most.
MAX_STEPS = 20_000
#: The size of a library is checked after this many insertions for each of its entries, since a check visits all.
CHECK_EVERY = 8
#: Most tiles of a program that are cached.
MAX_TILES = 10_000


class FoundTile(NamedTuple):
    """Kind of a tile, and its box of each map that the program reads; None for a map that the tile does not read."""

    kind: Hashable
    reads: tuple[Box | None, ...]


@dataclass(eq=False)
class Findings:
    """The tiles of a program on a grid, and the tapes of their kinds.

    Attributes:
        lasting: True if the library keeps them for the next recording.
        owned: The boxes that each tile owns, once `all_owned` has computed them.
        tiles: Tiles by the boxes that they own.
        kinds: Number of each kind.
        tapes: Tape of each kind.
        compiled: Compiled tapes.
        pass_bytes: Bytes that each pass over the tiles allocates at its peak; see [Note: watched] in `ledger`.
        last_run: The library's number of the last run that used them.
    """

    lasting: bool = False
    owned: Sequence[Owned] | None = None
    tiles: dict[Owned, FoundTile] = field(default_factory=dict)
    kinds: dict[Hashable, int] = field(default_factory=dict)
    tapes: dict[Hashable, Tape] = field(default_factory=dict)
    compiled: CompiledTapes = field(default_factory=CompiledTapes)
    pass_bytes: dict[Hashable, int] = field(default_factory=dict)
    last_run: int = 0

    def all_owned(self, program: Program, grid: Grid) -> Sequence[Owned] | Iterator[Owned]:
        """Return the boxes that each tile owns, one for each target."""
        if grid.tiles > MAX_TILES:
            return program.owned(grid)
        if self.owned is None:
            self.owned = tuple(program.owned(grid))
        return self.owned

    def tile(self, program: Program, owned: Owned) -> FoundTile:
        """Find the kind of a tile and the boxes that it reads."""
        need = program.boxes(owned)
        kind = kind_of(program, owned, need)
        return self.store(owned, self.kinds.setdefault(kind, len(self.kinds)), [need.get(v) for v in program.reads])

    def store(self, owned: Owned, kind: Hashable, reads: Sequence[Box | None]) -> FoundTile:
        """Store a tile, unless there are `MAX_TILES` already."""
        found = FoundTile(kind, tuple(reads))
        if len(self.tiles) < MAX_TILES:
            self.tiles[owned] = found
        return found

    @property
    def size(self) -> int:
        """Number of instructions and boxes."""
        steps = sum(len(tape.instructions) for tape in self.tapes.values())
        return steps + sum(len(owned) + len(tile.reads) for owned, tile in self.tiles.items())


def kind_of(program: Program, owned: Sequence[Box], need: Mapping[Value, Box]) -> Hashable:
    """Return the kind of a tile: sizes and relative positions of its boxes, and marks of operators.

    Operators that the tile does not run have None. See [Note: tapes] in `tape`.

    Args:
        program: The program.
        owned: The boxes that the tile owns, one for each target.
        need: The box that the tile holds of each map.
    """
    found: list[Hashable] = []
    reducing = {t.node.serial: box for t, box in zip(program.targets, owned, strict=True) if t.stored is None}
    for node in program.nodes:
        op = node.op
        out = reducing[node.serial] if isinstance(op, ReduceOp) else need.get(node.outputs[0])
        if out is None or (out.empty and isinstance(op, ReduceOp)):
            found.append(None)
            continue
        assert isinstance(op, (TileOp, ReduceOp))
        found += [relative_place(need.get(v), wanted) for v, wanted in zip(node.maps, op.need(out), strict=True)]
        if isinstance(op, TileOp):
            found.append(tuple([(hi - lo, op.mark(a, lo, hi)) for a, (lo, hi) in enumerate(out.intervals())]))
    for t, box in zip(program.targets, owned, strict=True):
        if t.stored is not None:
            found.append(relative_place(need.get(t.stored), box))
    return tuple(found)


def relative_place(held: Box | None, wanted: Box) -> Hashable:
    """Return the size of a held box, and the interval of the wanted box in it on each axis."""
    if held is None:
        return None
    ends = zip(held.lo, held.hi, wanted.lo, wanted.hi, strict=True)
    return tuple([(hi - lo, first - lo, end - lo) for lo, hi, first, end in ends])


class Library:
    """Cache of findings, least recently used ones evicted first; those of this run and the last one stay.

    Attributes:
        findings: Findings by program, grid and direction.
        runs: Number of runs of plans so far.
    """

    def __init__(self) -> None:
        self.findings: OrderedDict[Hashable, Findings] = OrderedDict()
        self.runs = 0
        self._new = 0

    def __reduce__(self) -> tuple[type[Library], tuple[()]]:
        return Library, ()  # copies and other processes begin with an empty library

    def find(self, program: Program, grid: Grid, scans: bool) -> Findings:
        """Return the findings of a program on a grid: cached or empty ones; ``scans``: its tiles hand rows on."""
        if program.key is None:
            return Findings()
        key = program.key, grid, scans
        found = self.findings.get(key)
        if found is None:
            self.evict()
            found = self.findings[key] = Findings(lasting=True)
        else:
            self.findings.move_to_end(key)
        found.last_run = self.runs
        return found

    def evict(self) -> None:
        """Evict the least recently used findings above `MAX_STEPS`, unless a step as large as the last needs them."""
        self._new += 1
        if self._new * CHECK_EVERY < len(self.findings):
            return
        self._new = 0
        size = sum(found.size for found in self.findings.values())
        while size > MAX_STEPS and next(iter(self.findings.values())).last_run < self.runs - 1:
            _, evicted = self.findings.popitem(last=False)
            size -= evicted.size
