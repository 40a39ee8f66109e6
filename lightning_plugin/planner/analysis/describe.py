"""What two recordings, or two operators, have in common: what decides whether a plan or a profile fits both."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from lightning_plugin.graph import Node
from lightning_plugin.recording import Recording


def signature(recording: Recording, gradients: bool = True) -> tuple[Any, ...]:
    """What two recordings have in common if and only if one's plan fits the other: structure, shapes, types, and
    whether images are read ahead or lie on the device.

    ``gradients``: also which parameters have a gradient already.
    """
    values = tuple((v.shape, str(v.dtype), v.requires_grad) for n in recording.nodes for v in n.outputs)
    return structure(recording, gradients, frozenset()), values


def structure(recording: Recording, gradients: bool, sizes: frozenset[int] | None = None) -> tuple[Any, ...]:
    """What two recordings have in common if they differ in nothing but the sizes of their images: a recipe of one is
    the other's. Numbers that an operator has from its maps' ``sizes`` do not count."""
    place = {v: i for i, v in enumerate(v for n in recording.nodes for v in n.outputs)}
    begun = {v for v, t in recording.bindings.captures.items() if t.tensor.is_leaf and t.tensor.grad is not None}
    return tuple(
        (
            type(n.op).__name__,
            describe(n.op, sizes_of(n) if sizes is None else sizes),
            tuple(place.get(v, -1) for v in n.inputs),
            tuple(
                (v.layout.dims if v.layout is not None else len(v.shape), str(v.dtype), v.requires_grad)
                for v in n.outputs
            ),
            n.inplace is not None,
            gradients and bool(n.outputs) and n.outputs[0] in begun,
        )
        for n in recording.nodes
    )


#: Smaller numbers are kernels and strides, whatever sizes maps have.
LEAST = 9


def sizes_of(node: Node) -> frozenset[int]:
    """The numbers that a node's operator may have from the sizes of its maps."""
    found: set[int] = set()
    for v in (*node.inputs, *node.outputs):
        if v.layout is not None:
            found |= {*v.space.extent, *v.shape, math.prod(v.shape), math.prod(v.space.extent)}
            found.add(math.prod(v.space.extent) * v.shape[0])
    return frozenset(n for n in found if n >= LEAST)


def describe(thing: Any, sizes: frozenset[int] = frozenset()) -> Any:
    """A description that is equal for equal operators, without the tensors and functions' identities, and without these
    numbers; what operators do not compare (a step's key of random numbers) is no part of it."""
    if isinstance(thing, Tensor) or hasattr(thing, "read"):
        return "tensor"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (
            type(thing).__name__,
            *(describe(getattr(thing, f.name), sizes) for f in dataclasses.fields(thing) if f.compare),
        )
    if isinstance(thing, dict):
        return tuple((k, describe(v, sizes)) for k, v in thing.items())
    if isinstance(thing, (list, tuple)):
        return tuple(describe(t, sizes) for t in thing)
    if callable(thing):
        return getattr(thing, "__qualname__", None) or str(thing)
    if isinstance(thing, (int, float)) and thing in sizes:
        return "size"
    return thing if isinstance(thing, (int, float, str, bool, type(None))) else str(thing)
