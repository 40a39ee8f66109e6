"""Forward of a segment: every tile without grad; stored maps are written, reductions merged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.alike import Owned, only_value
from lightning_plugin.execute.rehearsal import REHEARSAL
from lightning_plugin.execute.scan import run_tile, scan
from lightning_plugin.execute.segment import SegmentRun, read_tile
from lightning_plugin.graph import Value
from lightning_plugin.progress import told
from lightning_plugin.rules.base import ReduceOp, Reduction


class Forward:
    """One forward pass of a segment over all tiles."""

    def __init__(self, run: SegmentRun, inputs: Sequence[Tensor]) -> None:
        program = run.program
        self.segment = run
        self.vectors = {id(v): t.detach() for v, t in zip(program.vectors, inputs, strict=False)}
        self.spreads = {id(v): t.detach() for v, t in zip(run.spreads, inputs[len(program.vectors) :], strict=False)}
        self.totals: dict[int, Reduction] = {}
        #: What each tile of a scan was handed: backward begins with it.
        self.carried: list[dict[int, Tensor]] = []

    def run(self) -> list[Tensor]:
        """The reduced vectors, in the order of the targets; stored maps are where their handles say."""
        if self.segment.share:
            self.scan()
        else:
            for members in self.segment.loop(self.segment.program, False, lambda v: v.handle):
                self.tile(members)
        results: list[Tensor] = []
        for i, target in enumerate(self.segment.program.targets):
            if target.stored is None:
                op = target.node.op
                assert isinstance(op, ReduceOp)
                results.extend(op.finish(self.totals[i], [self.vectors[id(v)] for v in target.node.vectors]))
        return results

    def read(self, v: Value, box: Box) -> Tensor:
        return read_tile(v, box, self.spreads, v.handle)

    def scan(self) -> None:
        program = self.segment.program
        handed: dict[int, Tensor] = {}

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            self.emit(i, box, tiles, 1)

        for (tile,) in told([t] for t in scan(program, self.segment.forward_grid)):
            if self.segment.trains:
                self.carried.append(handed)
            handed = run_tile(program, tile, handed, self.read, self.vectors, emit, grad=False)

    def tile(self, members: Sequence[Owned]) -> None:
        """Evaluate a tile once, for all that are identical to it."""

        def emit(i: int, box: Box, tiles: Sequence[Tensor]) -> None:
            self.emit(i, box, tiles, len(members))
            stored = self.segment.program.targets[i].stored
            if stored is None or stored.handle is None or stored.handle.constants is None:
                return
            # A rehearsal looks too, so that memory is there for it.
            looking = len(members) > 1 or REHEARSAL.get() is not None
            key = only_value(stored.space, tiles[0], box) if looking else None
            for other in members[1:]:
                stored.handle.write(other[i], tiles[0])
            for member in members:
                stored.handle.constants.note(member[i], key)

        self.segment.program.run(members[0], self.read, self.vectors, emit, grad=False)

    def emit(self, i: int, box: Box, tiles: Sequence[Tensor], times: int) -> None:
        """A tile's share of a target, of a reduction as often as there are identical tiles."""
        target = self.segment.program.targets[i]
        if target.stored is not None:
            target.stored.handle.write(box, tiles[0])  # type: ignore[union-attr]
            return
        op = target.node.op
        assert isinstance(op, ReduceOp)
        part = repeated(op, op.partial(box, tiles, [self.vectors[id(v)] for v in target.node.vectors]), times)
        self.totals[i] = op.merge(self.totals[i], part) if i in self.totals else part


def repeated(op: ReduceOp, part: Reduction, times: int) -> Reduction:
    """A share merged with itself ``times`` times, by doubling."""
    total: Reduction | None = None
    while True:
        if times % 2:
            total = part if total is None else op.merge(total, part)
        times //= 2
        if not times:
            assert total is not None
            return total
        part = op.merge(part, part)
