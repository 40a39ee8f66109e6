"""Structural keys: equal for two operators, programs or recordings that compute the same.

A key is exact, or a plan's. The exact key decides whether tile programs that were made for one recording serve the
next, where a wrong answer is a wrong gradient. So nothing counts as equal that is not known to be: numbers with their
types, functions that are the same object for as long as the process lasts, and whatever is made of such things. An
operator with anything else in it (a tensor, a function made on the way) has no exact key. A plan's key is coarser, for
at worst a plan is a poor one: such things count by their type or name, and numbers that come from the sizes of maps may
be left out. As text (`repr`) it is the same in every process.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Hashable, Set
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from lightning_plugin.graph import Node, Recording, Value
from lightning_plugin.private import OPERATORS

#: Types whose values never change and are equal only to their like.
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
#: Smaller numbers are kernels and strides, whatever sizes maps have.
LEAST_SIZE = 9


class Unkeyed(Exception):
    """Something that may be another thing in the next recording though it looks the same."""


def key(thing: Any, sizes: Set[int] | None = None) -> Hashable:
    """Key of an operator, or of anything in one; what a dataclass does not compare is left out (see `varies`).

    Exact, unless ``sizes`` are given: numbers that a plan's key leaves out.

    Raises:
        Unkeyed: It has no exact key.
    """
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, (bool, int, float, complex)):
        if sizes and thing in sizes:
            return "size"
        return type(thing), repr(thing)  # one, 1.0 and True are equal, and so are the zeros; what is no number is not
    if isinstance(thing, (list, tuple)):
        return type(thing), tuple([key(part, sizes) for part in thing])
    if isinstance(thing, dict):
        return dict, tuple([(key(k, sizes), key(v, sizes)) for k, v in thing.items()])
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [f.name for f in dataclasses.fields(thing) if f.compare]
        if sizes is None:
            refuse_more(thing)
        return type(thing), tuple([key(getattr(thing, name), sizes) for name in names])
    if isinstance(thing, slice):
        return slice, key((thing.start, thing.stop, thing.step), sizes)
    if isinstance(thing, partial):
        return partial, key((thing.func, thing.args, thing.keywords), sizes)
    if isinstance(thing, MethodType):
        return MethodType, key((thing.__func__, thing.__self__), sizes)
    if lasts(thing):
        return Same(thing)
    if sizes is None:
        raise Unkeyed(repr(type(thing)))
    return name_of(thing if callable(thing) else type(thing))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Same:
    """A function or a class, equal to nothing but itself."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return name_of(self.thing)


def name_of(thing: Any) -> str:
    """Name of a function or a class, the same in every process."""
    if isinstance(thing, OPERATORS):
        return str(thing)
    module = getattr(thing, "__module__", None)  # a method of a class in C has none
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def lasts(thing: Any) -> bool:
    """True of what is the same object for as long as the process lasts, and holds nothing of a recording."""
    if isinstance(thing, (*OPERATORS, MethodDescriptorType)):
        return True
    if isinstance(thing, BuiltinFunctionType):
        return thing.__self__ is None or isinstance(thing.__self__, (ModuleType, type))
    return isinstance(thing, (FunctionType, type)) and named(thing)


def named(thing: Any) -> bool:
    """True of a function or class that its module has under its name: one made within a function is not."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def refuse_more(thing: Any) -> None:
    """Refuse a dataclass that holds more than its fields."""
    names = {f.name for f in dataclasses.fields(thing)}
    for name in getattr(thing, "__dict__", ()):
        if name not in names and not isinstance(getattr(type(thing), name, None), cached_property):
            raise Unkeyed(f"{name} of {type(thing)}")


def varies(thing: Any) -> bool:
    """True of what holds something that its key leaves out, and that may therefore be another in each recording: a key
    of random numbers, say."""
    if isinstance(thing, (list, tuple)):
        return any(map(varies, thing))
    if isinstance(thing, dict):
        return any(map(varies, thing.values()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return any(not f.compare or varies(getattr(thing, f.name)) for f in dataclasses.fields(thing))
    return False


def value_key(v: Value) -> Hashable:
    """All that is known of a value."""
    return v.shape, v.layout, v.dtype, v.device, v.requires_grad


def recording_key(recording: Recording, gradients: bool = True, sized: bool = True) -> Hashable:
    """A plan's key of a recording: structure, shapes, types, and whether images are read ahead or lie on the device.

    ``gradients``: also which parameters have a gradient already. Not ``sized``: equal for recordings that differ in
    nothing but the sizes of their images.
    """
    place = {v: i for i, v in enumerate(v for n in recording.nodes for v in n.outputs)}
    begun = {v for v, t in recording.bindings.captures.items() if t.tensor.is_leaf and t.tensor.grad is not None}
    return tuple(
        (
            key(n.op, frozenset() if sized else sizes_of(n)),
            tuple(place.get(v, -1) for v in n.inputs),
            tuple(
                (
                    v.layout.dims if v.layout is not None else len(v.shape),
                    v.shape if sized else (),
                    v.dtype,
                    v.requires_grad,
                )
                for v in n.outputs
            ),
            n.inplace is not None,
            gradients and bool(n.outputs) and n.outputs[0] in begun,
        )
        for n in recording.nodes
    )


def sizes_of(node: Node) -> frozenset[int]:
    """The numbers that a node's operator may have from the sizes of its maps."""
    found: set[int] = set()
    for v in (*node.inputs, *node.outputs):
        if v.layout is not None:
            found |= {*v.space.extent, *v.shape, math.prod(v.shape), math.prod(v.space.extent)}
            found.add(math.prod(v.space.extent) * v.shape[0])
    return frozenset(n for n in found if n >= LEAST_SIZE)
