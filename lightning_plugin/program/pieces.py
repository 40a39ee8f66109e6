"""Maps that a program can read piece by piece; see [Note: pieces] in `rules.pieces`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_plugin.boxes import Box, cuts
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Axis
from lightning_plugin.ops import TileOp
from lightning_plugin.program.program import Program
from lightning_plugin.rules.uncut import Uncut


@dataclass(frozen=True)
class Strip:
    """A map that is uncut along an ``axis`` of so many ``positions``, of which each is so many (``inner``) of the
    dimension that it is the outermost part of."""

    axis: int
    positions: int
    inner: int

    def ends(self, pieces: int) -> tuple[int, ...]:
        """Ends of so many pieces, or fewer, along the axis: of one length, but for the last."""
        return tuple(sorted({*cuts(self.positions, pieces)}))

    def boxes(self, box: Box, pieces: int) -> list[Box]:
        """The boxes of so many pieces of a tile."""
        ends = self.ends(pieces)
        return [box.replace(self.axis, lo, hi) for lo, hi in itertools.pairwise(ends)]

    @staticmethod
    def of(node: Node) -> Strip | None:
        """Strip that an `Uncut` has in one piece, if that is the outermost part of one dimension."""
        assert isinstance(node.op, Uncut)
        layout = node.inputs[0].space.tidy
        dims = [d for d in layout.dims if any(isinstance(f, Axis) and f.index in node.op.axes for f in d)]
        if len(dims) != 1:
            return None
        first, *rest = dims[0]
        if not isinstance(first, Axis) or first.index not in node.op.axes:
            return None
        inner = 1
        for f in rest:
            inner *= layout.extent[f.index] if isinstance(f, Axis) else f
        return Strip(first.index, layout.extent[first.index], inner)


def strips(program: Program, among: Collection[Value] | None = None) -> Mapping[Value, Strip]:
    """The maps that a program reads and that it can read piece by piece; ``among`` those that are stored, where
    some of them are not."""
    found: dict[Value, Strip] = {}
    readers: dict[Value, list[Node]] = {}
    for node in program.steps:
        for v in dict.fromkeys(node.maps):
            readers.setdefault(v, []).append(node)
    made = {t.stored for t in program.targets if t.stored is not None}
    read = program.reads if among is None else among
    for node in program.steps:
        found |= of_node(node, read, readers, made)
    return found


def of_node(
    node: Node, read: Collection[Value], readers: Mapping[Value, list[Node]], stored: set[Value]
) -> dict[Value, Strip]:  # fmt: skip
    """Maps that are read for one operator alone, if it takes pieces of all of them, which are cut alike."""
    places = node.op.in_pieces if isinstance(node.op, TileOp) else ()
    found: dict[Value, Strip] = {}
    uncuts = [node.maps[place] for place in places]
    for made in uncuts:
        source = uncut_from(made)
        strip = None if source is None else Strip.of(made.node)  # type: ignore[arg-type]
        if source is None or strip is None or source not in read or made in stored or readers[made] != [node]:
            return {}
        if any(reader not in [v.node for v in uncuts] for reader in readers[source]):
            return {}
        found[source] = strip
    return found if len({(strip.positions, strip.inner) for strip in found.values()}) == 1 else {}


def uncut_from(made: Value) -> Value | None:
    """The map that a value is, uncut."""
    node = made.node
    return node.inputs[0] if node is not None and isinstance(node.op, Uncut) else None
