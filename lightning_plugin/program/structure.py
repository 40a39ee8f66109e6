"""What two programs have in common if the tapes of one are the other's.

Planning compares recordings by what their operators are called (`planner.analysis.describe`): at worst a plan is a
poor one. Here a wrong answer is a wrong gradient, so nothing counts as equal that is not known to be: numbers with
their types, functions that are the same object for as long as the process lasts, and what is made of such things. An
operator with anything else in it (a tensor, a function made on the way) has no structure, and its program's tapes are
found anew.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Hashable
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.private import OPERATORS
from lightning_plugin.program.program import Program

#: What never changes and is equal only to its like.
PLAIN = (
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


class NoStructure(Exception):
    """Something that may be another thing in the next recording though it looks the same."""


def structure(program: Program, grid: Grid) -> Hashable | None:
    """What a program on a grid computes from what; None where that cannot be said."""
    try:
        steps = tuple(
            (exactly(n.op), exactly(n.inplace), places(program, n), tuple(map(described, n.outputs)))
            for n in program.steps
        )
    except NoStructure:
        return None
    numbers = {n.serial: i for i, n in enumerate(program.steps)}
    return (
        steps,
        tuple(map(described, program.reads)),
        tuple(map(described, program.vectors)),
        tuple((numbers[t.node.serial], t.stored is not None) for t in program.targets),
        frozenset(numbers[serial] for serial in program.overwrite),
        program.reference,
        grid,
    )


def places(program: Program, node: Node) -> tuple[tuple[bool, int], ...]:
    """Which of a program's maps and vectors a node reads."""
    slots, vectors = program.slots, program.places
    return tuple((v.is_map, slots[v] if v.is_map else vectors[v]) for v in node.inputs)


def described(v: Value) -> Hashable:
    """All that is known of a value."""
    return v.shape, v.layout, v.dtype, v.device, v.requires_grad


def exactly(thing: Any) -> Hashable:
    """A description that only equal things have; what a dataclass does not compare is left out (see `varies`)."""
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, (bool, int, float, complex)):
        return type(thing), repr(thing)  # one, 1.0 and True are equal, and so are the zeros; what is no number is not
    if isinstance(thing, (list, tuple)):
        return type(thing), tuple(map(exactly, thing))
    if isinstance(thing, dict):
        return dict, tuple((exactly(k), exactly(v)) for k, v in thing.items())
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return type(thing), tuple(exactly(getattr(thing, f.name)) for f in fields(thing) if f.compare)
    if isinstance(thing, slice):
        return slice, exactly((thing.start, thing.stop, thing.step))
    if isinstance(thing, partial):
        return partial, exactly((thing.func, thing.args, thing.keywords))
    if isinstance(thing, MethodType):
        return MethodType, exactly((thing.__func__, thing.__self__))
    if lasts(thing):
        return Same(thing)
    raise NoStructure(repr(type(thing)))


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """A function or a class, equal to nothing but itself."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def lasts(thing: Any) -> bool:
    """Whether something is the same object for as long as the process lasts, and holds nothing of a recording."""
    if isinstance(thing, (*OPERATORS, MethodDescriptorType)):
        return True
    if isinstance(thing, BuiltinFunctionType):
        return thing.__self__ is None or isinstance(thing.__self__, (ModuleType, type))
    return isinstance(thing, (FunctionType, type)) and named(thing)


def named(thing: Any) -> bool:
    """Whether a function or a class is what its module has under its name: one made within a function is not."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def fields(thing: Any) -> tuple[dataclasses.Field[Any], ...]:
    """A dataclass's fields, where it has nothing else."""
    found = dataclasses.fields(thing)
    names = {f.name for f in found}
    for name in getattr(thing, "__dict__", ()):
        if name not in names and not isinstance(getattr(type(thing), name, None), cached_property):
            raise NoStructure(f"{name} of {type(thing)}")
    return found


def varies(thing: Any) -> bool:
    """Whether something holds what its description leaves out, and what may therefore be another in each recording:
    a key of random numbers, say."""
    if isinstance(thing, (list, tuple)):
        return any(map(varies, thing))
    if isinstance(thing, dict):
        return any(map(varies, thing.values()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return any(not f.compare or varies(getattr(thing, f.name)) for f in dataclasses.fields(thing))
    return False
