"""Equal intervals of a network, of which only the first is costed.

[Note: repeats] A network of repeated blocks has many intervals of few kinds. The cost of an interval depends on the
operators of its program, the sizes of its maps and how they are connected, and not on its place. So each program has a
key, and of intervals with equal keys only the first is costed.
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
    """Numbers of nodes, and keys of programs made of these."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.of_node: dict[int, int] = {}
        self.found: dict[Hashable, Any] = {}

    def once(self, program: Program, what: Hashable, find: Callable[[], Found]) -> Found:
        """A result that is equal for all programs with the same key, computed for the first of them."""
        key = self.program_key(program), what
        if key not in self.found:
            self.found[key] = find()
        found: Found = self.found[key]
        return found

    def number(self, node: Node) -> int:
        """A number that nodes share which compute the same on maps of the same sizes."""
        found = self.of_node.get(node.serial)
        if found is None:
            values = tuple(map(value_key, (*node.inputs, *node.outputs)))
            program_key = of_operator(node), values, node.inplace is not None
            found = self.of_node[node.serial] = self.numbers.setdefault(program_key, len(self.numbers))
        return found

    def program_key(self, program: Program) -> Hashable:
        """A key that programs share which compute the same on maps of the same sizes."""
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
    """Key of an operator; one that cannot be described has a key of its own."""
    try:
        return key(node.op)
    except Unkeyed:
        return node.serial


def origin(v: Value) -> Hashable:
    """The source of a map that is read, as far as it changes the cost."""
    op = v.node.op if v.node is not None else None
    return (op.lies, op.prefetches, op.together) if isinstance(op, Source) else None
