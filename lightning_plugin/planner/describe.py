"""What two recordings, or two operators, have in common: what decides whether a plan or a profile fits both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_plugin.graph import Node
from lightning_plugin.ops import Captured, Source
from lightning_plugin.source import prefetches


def signature(nodes: Sequence[Node], gradients: bool = True) -> tuple[Any, ...]:
    """What two recordings have in common if and only if one's plan fits the other: structure, shapes, types, and
    whether images are read ahead or lie on the device.

    ``gradients``: also which parameters have a gradient already.
    """
    place = {id(v): i for i, v in enumerate(v for n in nodes for v in n.outputs)}
    return tuple(
        (
            type(n.op).__name__,
            describe(n.op),
            tuple(place.get(id(v), -1) for v in n.inputs),
            tuple((v.shape, str(v.dtype), v.requires_grad) for v in n.outputs),
            n.inplace is not None,
            isinstance(n.op, Source) and (prefetches(n.op.image), n.op.here is not None),
            gradients and isinstance(n.op, Captured) and n.op.tensor.is_leaf and n.op.tensor.grad is not None,
        )
        for n in nodes
    )


def describe(thing: Any) -> Any:
    """A description that is equal for equal operators, without the tensors and functions' identities."""
    if isinstance(thing, Tensor) or hasattr(thing, "read"):
        return "tensor"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (
            type(thing).__name__,
            *(
                describe(getattr(thing, f.name))
                for f in dataclasses.fields(thing)
                if f.name not in ("tensor", "version", "image")
            ),
        )
    if isinstance(thing, dict):
        return tuple((k, describe(v)) for k, v in thing.items())
    if isinstance(thing, (list, tuple)):
        return tuple(describe(t) for t in thing)
    if callable(thing):
        return getattr(thing, "__qualname__", None) or str(thing)
    return thing if isinstance(thing, (int, float, str, bool, type(None))) else str(thing)
