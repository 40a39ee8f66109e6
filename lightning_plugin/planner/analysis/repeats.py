"""Intervals that compute the same: what one costs, all cost.

[Note: repeats] A network of repeated blocks has many intervals of few kinds. What an interval costs depends on what its
program computes, on the sizes of its maps and on how they hang together, and not on where it stands. So intervals are
described once, and of those with equal descriptions only the first is costed. What rehearsals teach is kept for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Source
from lightning_plugin.program.key import Unkeyed, key, value_key
from lightning_plugin.program.program import Program

Found = TypeVar("Found")


class Repeats:
    """Numbers for nodes, and looks of programs made of these."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.of_node: dict[int, int] = {}
        self.found: dict[Hashable, Any] = {}

    def once(self, program: Program, what: Hashable, find: Callable[[], Found]) -> Found:
        """Something that is the same for all programs that look the same."""
        key = self.look(program), what
        if key not in self.found:
            self.found[key] = find()
        found: Found = self.found[key]
        return found

    def number(self, node: Node) -> int:
        """The same for nodes that compute the same on maps of the same sizes."""
        found = self.of_node.get(node.serial)
        if found is None:
            values = tuple(map(value_key, (*node.inputs, *node.outputs)))
            look = of_operator(node), values, node.inplace is not None
            found = self.of_node[node.serial] = self.numbers.setdefault(look, len(self.numbers))
        return found

    def look(self, program: Program) -> Hashable:
        """What programs have in common that compute the same on maps of the same sizes."""
        place = {v: i for i, v in enumerate((*program.reads, *program.vectors))}
        steps = []
        for n in program.steps:
            for v in n.outputs:
                place.setdefault(v, len(place))
            hung = tuple([place[v] for v in (*n.inputs, *n.outputs)])
            steps.append((self.number(n), hung, n.serial in program.overwrite))
        targets = tuple((place[t.node.outputs[0]], t.stored is not None) for t in program.targets)
        return tuple(map(origin, program.reads)), len(program.vectors), tuple(steps), targets


def of_operator(node: Node) -> Hashable:
    """What operators have in common that compute the same; one that cannot be described is like no other."""
    try:
        return key(node.op)
    except Unkeyed:
        return node.serial


def origin(v: Value) -> Hashable:
    """Where a map that is read comes from, as far as that costs anything."""
    op = v.node.op if v.node is not None else None
    return (op.lies, op.prefetches, op.together) if isinstance(op, Source) else None
