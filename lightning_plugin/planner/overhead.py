"""Less work in planning: memoized methods, equal programs that are costed once, and no collection of cycles.

Memoized results lie in the object of the method and hold no reference to it, so that they are freed with it.
(`functools.cache` on a bound method keeps its object alive.)

[Note: repeats] A network of repeated blocks has many intervals of few kinds. The cost of an interval depends on the
operators of its program, the sizes of its maps and how they are connected, and not on its place. So each program has a
key, and of intervals with equal keys only the first is costed.

[Note: collector] Python's collector of cycles visits all objects of a process, the modules of PyTorch too, whenever
some hundreds were made. A search makes millions without cycles: the visits take a sixth of its time. And a rehearsal
counts memory where it is freed; objects that wait for the collector would be freed at another place in each process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_plugin.graph import Node, Value
from lightning_plugin.ops import Source
from lightning_plugin.program.key import Unkeyed, structural_key, value_key
from lightning_plugin.program.program import Program

Self = TypeVar("Self")
Args = ParamSpec("Args")
Found = TypeVar("Found")


def memoized(method: Callable[Concatenate[Self, Args], Found]) -> Callable[Concatenate[Self, Args], Found]:
    """A method whose results are memoized by its arguments, which are given by position."""
    name = f"answers of {method.__name__}"

    @wraps(method)
    def ask(self: Any, *args: Any) -> Any:
        try:
            return self.__dict__[name][args]
        except KeyError:
            pass
        found = method(self, *args)  # type: ignore[call-arg]
        self.__dict__.setdefault(name, {})[args] = found
        return found

    return ask  # type: ignore[return-value]


@contextmanager
def without_gc() -> Iterator[None]:
    """A block without automatic garbage collection of cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Repeats:
    """Numbers of nodes, and keys of programs made of these."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.node_numbers: dict[int, int] = {}
        self.found: dict[Hashable, Any] = {}

    def once(self, program: Program, what: Hashable, find: Callable[[], Found]) -> Found:
        """A result that is equal for all programs with the same key, computed for the first of them."""
        key = self.program_key(program), what
        if key not in self.found:
            self.found[key] = find()
        found: Found = self.found[key]
        return found

    def number(self, node: Node) -> int:
        """A number of all nodes that compute the same on maps of the same sizes."""
        found = self.node_numbers.get(node.serial)
        if found is None:
            values = tuple(map(value_key, (*node.inputs, *node.outputs)))
            program_key = operator_key(node), values, node.inplace is not None
            found = self.node_numbers[node.serial] = self.numbers.setdefault(program_key, len(self.numbers))
        return found

    def program_key(self, program: Program) -> Hashable:
        """A key of all programs that compute the same on maps of the same sizes."""
        place = {v: i for i, v in enumerate((*program.reads, *program.vectors))}
        steps = []
        for n in program.nodes:
            for v in n.outputs:
                place.setdefault(v, len(place))
            hung = tuple([place[v] for v in (*n.inputs, *n.outputs)])
            steps.append((self.number(n), hung, n.serial in program.in_place))
        targets = tuple((place[t.node.outputs[0]], t.stored is not None) for t in program.targets)
        return tuple(map(source_key, program.reads)), len(program.vectors), tuple(steps), targets


def operator_key(node: Node) -> Hashable:
    """The key of an operator; its serial number if it has no description."""
    try:
        return structural_key(node.op)
    except Unkeyed:
        return node.serial


def source_key(v: Value) -> Hashable:
    """The facts about the source of a map that change its cost."""
    op = v.node.op if v.node is not None else None
    return (op.location, op.prefetches, op.reads_all_images) if isinstance(op, Source) else None
