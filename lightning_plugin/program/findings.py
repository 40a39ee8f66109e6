"""Cache of tile programs: boxes, kinds and tapes of a program's tiles on a grid, for the next recording.

[Note: findings] A step is recorded anew, and computes what the one before did: kinds, boxes and tapes of its tiles
depend on nothing but the program's structure and the grid. They are found once, and kept where the plans are. What may
have changed between two recordings is asked of the structure (`program.key`): everything that an operator, a
layout or a value has in it counts, types and flags too, and what cannot be compared for sure is not kept. Findings hold
no data and nothing of a graph, so they keep no recording alive.
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

#: The boxes of every target that a tile owns.
Owned = tuple[Box, ...]
#: So many steps of tapes are kept at most: some tens of megabytes.
MOST = 100_000
#: Their size is added up again when so many parts of them are new: a look takes as long as there are findings.
NEW = 8
#: Tiles are remembered of grids of no more tiles.
FEW = 10_000


class FoundTile(NamedTuple):
    """The kind of a tile, and its box of each map that the program reads, None where it needs nothing of one."""

    kind: Hashable
    reads: tuple[Box | None, ...]


@dataclass(eq=False)
class Findings:
    """The tiles of a program on a grid, and the tapes of their kinds.

    Attributes:
        lasting: True if the next recording finds them again.
        owned: The boxes that each tile owns, once all of them were asked for.
        tiles: What was found of tiles, by the boxes that they own.
        kinds: The number of each kind.
        tapes: The tape of each kind.
        compiled: The tapes that were compiled.
        passes: The bytes that passes over the tiles have held beyond what lay there; see [Note: watched] in `ledger`.
    """

    lasting: bool = False
    owned: Sequence[Owned] | None = None
    tiles: dict[Owned, FoundTile] = field(default_factory=dict)
    kinds: dict[Hashable, int] = field(default_factory=dict)
    tapes: dict[Hashable, Tape] = field(default_factory=dict)
    compiled: CompiledTapes = field(default_factory=CompiledTapes)
    passes: dict[Hashable, int] = field(default_factory=dict)

    def all_owned(self, program: Program, grid: Grid) -> Sequence[Owned] | Iterator[Owned]:
        """The boxes of every target that each tile owns."""
        if grid.tiles > FEW:
            return program.owned(grid)
        if self.owned is None:
            self.owned = tuple(program.owned(grid))
        return self.owned

    def tile(self, program: Program, owned: Owned) -> FoundTile:
        """The kind of a tile, and what it reads."""
        need = program.boxes(owned)
        kind = kind_of(program, owned, need)
        return self.keep(owned, self.kinds.setdefault(kind, len(self.kinds)), [need.get(v) for v in program.reads])

    def keep(self, owned: Owned, kind: Hashable, reads: Sequence[Box | None]) -> FoundTile:
        """Remember a tile, among few."""
        found = FoundTile(kind, tuple(reads))
        if len(self.tiles) < FEW:
            self.tiles[owned] = found
        return found

    @property
    def size(self) -> int:
        """Number of steps of tapes it holds; tiles count as much for each box."""
        steps = sum(len(tape.steps) for tape in self.tapes.values())
        return steps + sum(len(owned) + len(tile.reads) for owned, tile in self.tiles.items())


def kind_of(program: Program, owned: Sequence[Box], need: Mapping[Value, Box]) -> Hashable:
    """The kind of a tile of which ``need`` is held: the sizes of its boxes, their places in each other, and the marks
    of operators; None in place of what it has no share in. See [Note: tapes] in `tape`."""
    found: list[Hashable] = []
    reducing = {t.node.serial: box for t, box in zip(program.targets, owned, strict=True) if t.stored is None}
    for node in program.steps:
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
    """The size of a box that is held, and the place in it of what is wanted."""
    if held is None:
        return None
    ends = zip(held.lo, held.hi, wanted.lo, wanted.hi, strict=True)
    return tuple([(hi - lo, first - lo, end - lo) for lo, hi, first, end in ends])


class Library:
    """Findings by the structure they are of, the most recently used ones."""

    def __init__(self) -> None:
        self.findings: OrderedDict[Hashable, Findings] = OrderedDict()
        self._new = 0

    def __reduce__(self) -> tuple[type[Library], tuple[()]]:
        return Library, ()  # a copy, or another process, finds its own

    def of(self, program: Program, grid: Grid, scans: bool) -> Findings:
        """The findings of a program on a grid, whose tiles hand rows on if it ``scans``: those that are kept, or blank
        ones."""
        if program.key is None:
            return Findings()
        key = program.key, grid, scans
        found = self.findings.get(key)
        if found is None:
            self.shorten()
            found = self.findings[key] = Findings(lasting=True)
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
