"""Maps that a program can read piece by piece; see [Note: pieces] in `rules.attention_pieces`."""

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
class UncutAxis:
    """Axis along which tiles hold a map uncut, so that it can be read in pieces.

    Attributes:
        axis: The axis; it is the outermost factor of a dimension.
        positions: Its extent.
        inner: Product of the other factors of the dimension.
    """

    axis: int
    positions: int
    inner: int

    def ends(self, pieces: int) -> tuple[int, ...]:
        """Return the bounds of a number of equal pieces along the axis; the last may be shorter."""
        return tuple(sorted({*cuts(self.positions, pieces)}))

    def boxes(self, box: Box, pieces: int) -> list[Box]:
        """Divide the box of a tile into a number of pieces."""
        ends = self.ends(pieces)
        return [box.replace(self.axis, lo, hi) for lo, hi in itertools.pairwise(ends)]

    @staticmethod
    def of(node: Node) -> UncutAxis | None:
        """Return the axis that an `Uncut` holds whole, if it is the outermost factor of one dimension."""
        assert isinstance(node.op, Uncut)
        layout = node.inputs[0].space.normalized
        dims = [d for d in layout.dims if any(isinstance(f, Axis) and f.index in node.op.axes for f in d)]
        if len(dims) != 1:
            return None
        first, *rest = dims[0]
        if not isinstance(first, Axis) or first.index not in node.op.axes:
            return None
        inner = 1
        for f in rest:
            inner *= layout.extent[f.index] if isinstance(f, Axis) else f
        return UncutAxis(first.index, layout.extent[first.index], inner)


def uncut_axes(program: Program, among: Collection[Value] | None = None) -> Mapping[Value, UncutAxis]:
    """Return the uncut axis of each map that a program can read piece by piece; ``among`` limits the maps."""
    found: dict[Value, UncutAxis] = {}
    readers: dict[Value, list[Node]] = {}
    for node in program.nodes:
        for v in dict.fromkeys(node.maps):
            readers.setdefault(v, []).append(node)
    made = {t.stored for t in program.targets if t.stored is not None}
    read = program.reads if among is None else among
    for node in program.nodes:
        found |= uncut_axes_of_node(node, read, readers, made)
    return found


def uncut_axes_of_node(
    node: Node, read: Collection[Value], readers: Mapping[Value, list[Node]], stored: set[Value]
) -> dict[Value, UncutAxis]:  # fmt: skip
    """Return the maps that one operator reads in pieces: no other operator reads them, and all have equal pieces."""
    places = node.op.inputs_in_pieces if isinstance(node.op, TileOp) else ()
    found: dict[Value, UncutAxis] = {}
    uncuts = [node.maps[place] for place in places]
    for made in uncuts:
        source = source_of_uncut(made)
        strip = None if source is None else UncutAxis.of(made.node)  # type: ignore[arg-type]
        if source is None or strip is None or source not in read or made in stored or readers[made] != [node]:
            return {}
        if any(reader not in [v.node for v in uncuts] for reader in readers[source]):
            return {}
        found[source] = strip
    return found if len({(strip.positions, strip.inner) for strip in found.values()}) == 1 else {}


def source_of_uncut(made: Value) -> Value | None:
    """Return the input of an `Uncut` that makes a value; None for other values."""
    node = made.node
    return node.inputs[0] if node is not None and isinstance(node.op, Uncut) else None
