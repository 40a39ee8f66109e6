"""Structural keys: equal for two operators, programs or recordings that compute the same.

An *exact* key decides if tapes made for one recording serve the next; two different operators with one exact key would
give a wrong gradient. So only these have exact keys: numbers with their types, functions that are one object as long as
the process lasts, and structures of them. An operator that holds anything else (a tensor, a closure) has none.

A plan's key is coarser, since a wrong match makes at worst a slow plan: other objects count by type or name, and
numbers that come from sizes of maps may be left out. Its `repr` is the same in every process.
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

#: Immutable types that equal no value of another type.
CONSTANT_TYPES = (
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
#: Smallest number that may be a map's size; smaller ones are kernels and strides.
MIN_SIZE = 9


class Unkeyed(Exception):
    """An object has no exact key."""


class HashedKey:
    """Key that computes its hash once: tuples compute theirs at each use."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashedKey) and self.key == other.key)


def structural_key(thing: Any, sizes: Set[int] | None = None) -> Hashable:
    """Return the key of an operator, or of an object in one, without the fields that a dataclass does not compare (see
    `has_unkeyed_fields`).

    Args:
        thing: The operator or object.
        sizes: Numbers that a plan's key leaves out; None for the exact key.

    Raises:
        Unkeyed: It has no exact key.
    """
    if isinstance(thing, CONSTANT_TYPES):
        return thing
    if isinstance(thing, (bool, int, float, complex)):
        if sizes and thing in sizes:
            return "size"
        return type(thing), repr(thing)  # 1, 1.0 and True are equal, 0.0 and -0.0 too, and NaN equals nothing
    if isinstance(thing, (list, tuple)):
        return type(thing), tuple([structural_key(part, sizes) for part in thing])
    if isinstance(thing, dict):
        return dict, tuple([(structural_key(k, sizes), structural_key(v, sizes)) for k, v in thing.items()])
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [f.name for f in dataclasses.fields(thing) if f.compare]
        if sizes is None:
            refuse_hidden_state(thing)
        return type(thing), tuple([structural_key(getattr(thing, name), sizes) for name in names])
    if isinstance(thing, slice):
        return slice, structural_key((thing.start, thing.stop, thing.step), sizes)
    if isinstance(thing, partial):
        return partial, structural_key((thing.func, thing.args, thing.keywords), sizes)
    if isinstance(thing, MethodType):
        return MethodType, structural_key((thing.__func__, thing.__self__), sizes)
    if is_permanent(thing):
        return Identity(thing)
    if sizes is None:
        raise Unkeyed(repr(type(thing)))
    return qualified_name(thing if callable(thing) else type(thing))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """Function or class, compared by identity."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return qualified_name(self.thing)


def qualified_name(thing: Any) -> str:
    """Return the name of a function or a class, the same in every process."""
    if isinstance(thing, OPERATORS):
        return str(thing)
    module = getattr(thing, "__module__", None)  # a method of a class in C has none
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def is_permanent(thing: Any) -> bool:
    """True for an object that is never replaced while the process lasts, and holds nothing of a recording."""
    if isinstance(thing, (*OPERATORS, MethodDescriptorType)):
        return True
    if isinstance(thing, BuiltinFunctionType):
        return thing.__self__ is None or isinstance(thing.__self__, (ModuleType, type))
    return isinstance(thing, (FunctionType, type)) and is_importable(thing)


def is_importable(thing: Any) -> bool:
    """True for a function or class that can be imported by its name, unlike one made within a function."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def refuse_hidden_state(thing: Any) -> None:
    """Refuse a dataclass that holds more than its fields."""
    names = {f.name for f in dataclasses.fields(thing)}
    for name in getattr(thing, "__dict__", ()):
        if name not in names and not isinstance(getattr(type(thing), name, None), cached_property):
            raise Unkeyed(f"{name} of {type(thing)}")


def has_unkeyed_fields(thing: Any) -> bool:
    """True for an object with fields that its key leaves out, such as a key of random numbers: they may differ between
    recordings with equal keys."""
    if isinstance(thing, (list, tuple)):
        return any(map(has_unkeyed_fields, thing))
    if isinstance(thing, dict):
        return any(map(has_unkeyed_fields, thing.values()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return any(not f.compare or has_unkeyed_fields(getattr(thing, f.name)) for f in dataclasses.fields(thing))
    return False


def value_key(v: Value) -> Hashable:
    """Return the key of a value: shape, layout, type, device and ``requires_grad``."""
    return v.shape, v.layout, v.dtype, v.device, v.requires_grad


def recording_key(recording: Recording, gradients: bool = True, sized: bool = True) -> Hashable:
    """Return a plan's key of a recording: structure, shapes, types, and kinds of sources.

    Args:
        recording: The recording.
        gradients: Include which parameters have a gradient already.
        sized: Include sizes; otherwise recordings that differ in the sizes of their images alone have one key.
    """
    place = {v: i for i, v in enumerate(v for n in recording.nodes for v in n.outputs)}
    with_grad = {v for v, t in recording.bindings.captures.items() if t.tensor.is_leaf and t.tensor.grad is not None}
    return tuple(
        (
            structural_key(n.op, frozenset() if sized else sizes_of(n)),
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
            gradients and bool(n.outputs) and n.outputs[0] in with_grad,
        )
        for n in recording.nodes
    )


def sizes_of(node: Node) -> frozenset[int]:
    """Return the numbers in a node's operator that may come from the sizes of its maps."""
    found: set[int] = set()
    for v in (*node.inputs, *node.outputs):
        if v.layout is not None:
            found |= {*v.space.extent, *v.shape, math.prod(v.shape), math.prod(v.space.extent)}
            found.add(math.prod(v.space.extent) * v.shape[0])
    return frozenset(n for n in found if n >= MIN_SIZE)
