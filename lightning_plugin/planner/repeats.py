"""Intervals that compute the same: what one costs, all cost.

[Note: repeats] A network of repeated blocks has many intervals of few kinds. What an interval costs depends on what its
program computes, on the sizes of its maps and on how they hang together, and not on where it stands. So intervals are
described once, and of those with equal descriptions only the first is costed. What rehearsals teach is kept for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Source
from lightning_plugin.planner.describe import exactly
from lightning_plugin.planner.network import Network
from lightning_plugin.program.program import Program


class Repeats:
    """Which programs, and which kept intervals, are like which before them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.numbers: dict[Hashable, int] = {}
        self.of_node: dict[int, int] = {}
        self.first: dict[Hashable, tuple[int, int]] = {}

    def number(self, node: Node) -> int:
        """The same for nodes that compute the same on maps of the same sizes."""
        found = self.of_node.get(node.serial)
        if found is None:
            values = tuple(of_value(v) for v in (*node.inputs, *node.outputs))
            look = exactly(node.op), values, node.inplace is not None
            found = self.of_node[node.serial] = self.numbers.setdefault(look, len(self.numbers))
        return found

    def tiled(self, program: Program, begin: int, end: int) -> tuple[int, int]:
        """The first interval whose program is like this one's."""
        return self.first.setdefault(self.look(program), (begin, end))

    def look(self, program: Program) -> Hashable:
        """What programs have in common that compute the same on maps of the same sizes."""
        place = {id(v): i for i, v in enumerate((*program.reads, *program.vectors))}
        steps = self.steps(program.steps, place, lambda n: n.serial in program.overwrite)
        targets = tuple((place[id(t.node.outputs[0])], t.stored is not None) for t in program.targets)
        return "tiled", tuple(lies(v) for v in program.reads), len(program.vectors), steps, targets

    def kept(self, begin: int, end: int) -> tuple[int, int]:
        """The first interval that holds the same where it is kept."""
        network = self.network
        nodes = network.order[begin:end]
        place: dict[int, int] = {}
        for n in nodes:
            for v in n.inputs:
                place.setdefault(id(v), len(place))
        alive = {id(v) for v in network.alive[end]}

        def apart(n: Node) -> Hashable:
            written = n.inplace is not None and network.root(n.outputs[0]) is not n.outputs[0]
            return n.serial in network.fused, written, tuple(id(v) in alive for v in n.outputs)

        lying = tuple(lies(v) for n in nodes for v in n.maps)
        steps = self.steps(nodes, place, apart)
        # A map that ends alive counts from its last reader on, whether it was made here or only read.
        read_on = tuple(sorted(place[key] for key in alive if key in place))
        return self.first.setdefault(("kept", lying, steps, read_on), (begin, end))

    def steps(self, nodes: Iterable[Node], place: dict[int, int], more: Callable[[Node], Hashable]) -> Hashable:
        found = []
        for n in nodes:
            for v in n.outputs:
                place.setdefault(id(v), len(place))
            found.append((self.number(n), tuple(place[id(v)] for v in (*n.inputs, *n.outputs)), more(n)))
        return tuple(found)


def of_value(v: Value) -> Hashable:
    return v.shape, v.dtype, v.requires_grad, v.is_map, v.layout, v.device


def lies(v: Value) -> Hashable:
    """Where a map that is read comes from, as far as that costs anything."""
    op = v.node.op if v.node is not None else None
    return (op.lies, op.prefetches) if isinstance(op, Source) else None
