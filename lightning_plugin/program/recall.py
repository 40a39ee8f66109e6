"""Stored maps that the backward of the segment that made them reads back.

[Note: recall] A statistic's derivative needs the values of the map that it is of, and so a train-mode BatchNorm has the
convolution before it computed again in backward, although its result is stored. A segment that *recalls* reads it from
there. What its reductions add to the cotangent of the map is found tile by tile, of values that were stored, and with
that the reductions are done: they are no targets of the backward, and nobody reads the result of the convolution, which
is not made (see [Note: unread] in `rules.unread`).

That is so of a map whose operator can do without its result and which reductions alone read within the segment, as the
one map that they look at, with no gradient to any vector and not to find results by their bits. The segment leases what
it recalls, as a reader would: so it is there until the segment's own backward is over, which comes after that of every
reader. That is memory on the device, or a read from a lower tier; a plan says which segments do it. Of identical tiles
([Note: identical tiles] in `execute.identical`) one is read for what the reductions add to all of them. What is kept as
bfloat16 is not what was computed, what is dropped is not there, and a scan makes its rows in another order: these are
not recalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import ReduceOp, TileOp
from lightning_plugin.program.program import Program, Target


def recallable(program: Program) -> Mapping[int, tuple[Target, ...]]:
    """The reductions of each stored map that may be recalled, by the serial of the node that makes it."""
    reductions = {t.node.serial: t for t in program.targets if t.stored is None}
    readers: dict[Value, list[Node]] = {}
    for node in program.steps:
        for v in node.maps:
            readers.setdefault(v, []).append(node)
    found: dict[int, tuple[Target, ...]] = {}
    for t in program.targets:
        nodes = readers.get(t.stored, ()) if t.stored is not None else ()
        if nodes and t.requires_grad and is_unread(t.node) and all(map(looks_alone, nodes)):
            found[t.node.serial] = tuple(reductions[n.serial] for n in nodes)
    return found


def looks_alone(node: Node) -> bool:
    """True of a reduction of one map, whose derivative needs no more than that map's tiles."""
    op = node.op
    if not isinstance(op, ReduceOp) or op.seeks or len(node.maps) != 1:
        return False
    return not any(v.requires_grad for v in node.vectors)


def is_unread(node: Node) -> bool:
    """True of a node that can be pulled back without its result."""
    return isinstance(node.op, TileOp) and node.op.unread(Box.whole(node.outputs[0].space.extent)) is not None


@dataclass(frozen=True, eq=False)
class InBackward:
    """A ``program`` as its backward runs it: without the ``reductions`` of what is recalled."""

    program: Program
    reductions: tuple[Target, ...]

    @staticmethod
    def of(whole: Program) -> InBackward:
        reductions = tuple(t for found in recallable(whole).values() for t in found)
        gone = {t.node.serial for t in reductions}
        return InBackward(whole.narrow([t for t in whole.targets if t.node.serial not in gone]), reductions)

    @property
    def maps(self) -> tuple[Value, ...]:
        """The maps that are recalled."""
        return tuple(dict.fromkeys(t.map for t in self.reductions))
