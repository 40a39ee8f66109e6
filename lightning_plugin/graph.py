"""The recorded network: values, and the nodes that compute them.

A *map* is a value with space in its layout and is never held whole unless a plan says so; a *vector* is any other
value, small, and an ordinary tensor once it is computed. Nodes point at their inputs, so a graph is whatever can be
reached from the values that are wanted; there is no container to keep in step.

[Note: frozen] A graph holds no data and never changes. What its images and captured tensors are is said by `Bindings`,
what a run of it has computed by that run's `Frame`: one graph can be run, rehearsed while it runs, and run again.
Values and nodes point at each other; since no data hangs on them, no tensor waits for the garbage collector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_plugin.layout import Layout

if TYPE_CHECKING:
    from lightning_plugin.ops import Op

#: So many numbers, less one, are free behind each node's.
ROOM = 32

#: Numbers for nodes, in the order in which they are recorded; between two there is room for what a chain puts there.
_serial = itertools.count(step=ROOM)


def next_serial() -> int:
    """A number between those of the nodes that are recorded already and of those to come."""
    return next(_serial)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One tensor of the recorded network.

    ``fake`` knows shape, dtype and device and holds no data. ``layout`` is None for a vector. ``node`` is what makes
    the value.
    """

    fake: Tensor
    layout: Layout | None
    requires_grad: bool
    node: Node | None = field(default=None, init=False)

    @property
    def is_map(self) -> bool:
        return self.layout is not None

    @property
    def space(self) -> Layout:
        """The layout of a map."""
        if self.layout is None:
            raise TypeError(f"a vector of shape {tuple(self.fake.shape)} has no spatial layout")
        return self.layout

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.fake.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype

    @property
    def device(self) -> torch.device:
        return self.fake.device

    @property
    def bytes(self) -> int:
        return self.fake.numel() * self.fake.element_size()

    @property
    def label(self) -> str:
        return self.node.label if self.node is not None else f"tensor of shape {self.shape}"


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One operator call: its rule's operator, what it reads (its ``maps`` and ``vectors`` apart) and what it makes.

    ``inplace`` is the in-place form of the operator where the user's code used it: wherever nobody else needs the
    input, it may be used again.
    """

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    name: str = ""
    path: str = ""
    inplace: Any = None
    serial: int = field(default_factory=next_serial)
    maps: tuple[Value, ...] = field(init=False)
    vectors: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple([v for v in self.inputs if v.is_map]))
        object.__setattr__(self, "vectors", tuple([v for v in self.inputs if not v.is_map]))
        for v in self.outputs:
            object.__setattr__(v, "node", self)  # the one knot: neither can be made before the other

    @property
    def label(self) -> str:
        """The operator and the module it belongs to, as messages name it."""
        return f"{self.name} in '{self.path}'" if self.path else self.name


@dataclass(eq=False)
class Effect:
    """Something that must happen once when its values are known: running statistics are updated, say.

    ``writes`` are the buffers that it moves. Where the run that was to bring its values about has failed, it is
    *dormant*: nobody asks for its sake, and it happens if its values are computed after all. Where ``torch.utils.
    checkpoint`` computes it again in backward, ``block`` says in which block, ``count`` is what the module adds one to
    besides, ``tensors`` are its values, and ``repeated`` is the last backward pass in which it happened again.
    """

    values: tuple[Value, ...]
    run: Callable[[Sequence[Tensor]], None]
    writes: tuple[Tensor, ...] = ()
    dormant: bool = False
    block: Hashable = None
    count: Tensor | None = None
    tensors: Sequence[Tensor] = ()
    repeated: int = -1


def ancestors(wanted: Iterable[Value], known: Container[Value] = ()) -> list[Node]:
    """The nodes that still have to run to make the wanted values, beside those that are known, in the order in which
    they were recorded."""
    seen: dict[int, Node] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        node = value.node
        if node is None or node.serial in seen or value in known:
            continue
        seen[node.serial] = node
        stack.extend(node.inputs)
    return [seen[s] for s in sorted(seen)]
