"""The recorded network: values, the nodes that compute them, and what stands behind its images and captured tensors.

A *map* is a value with space in its layout and is never held whole unless a plan says so; a *vector* is any other
value, small, and an ordinary tensor once it is computed. Nodes point at their inputs, so a graph is whatever can be
reached from the values that are wanted; there is no container to keep in step.

[Note: frozen] A graph holds no data and never changes. What its images and captured tensors are is said by `Bindings`,
what a run of it has computed by that run's `Frame`: one graph can be run, rehearsed while it runs, and run again.
Values and nodes point at each other; since no data hangs on them, no tensor waits for the garbage collector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import LEAST, SHORTEST, Constants, value_key
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Gather, Op
from lightning_plugin.private import BatchNormBase, Version, version
from lightning_plugin.source import TensorSource, TileSource, instances_of, read_part, understood

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
    def autocast_type(self) -> str:
        """The type of its device, as autocast knows it."""
        found = self.device.type
        return found if torch.amp.is_autocast_available(found) else "cpu"

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
    checkpoint`` computes it again in backward, ``block`` says in which block, ``norm`` is the module, which counts its
    batches, ``tensors`` are its values, and ``repeated`` is the last backward pass in which it happened again.
    """

    values: tuple[Value, ...]
    run: Callable[..., None]
    writes: tuple[Tensor, ...] = ()
    dormant: bool = False
    block: Hashable = None
    norm: BatchNormBase | None = None
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


# Recordings

#: An image is asked for background in no more parts than this, on an axis and in all.
PARTS_ON_AXIS, PARTS = 64, 1 << 13


@dataclass(frozen=True, eq=False)
class Image:
    """The pixels behind a `Source`: they go to ``device``; ``version`` is the one that was recorded."""

    source: TileSource
    device: torch.device
    version: Any = None

    @staticmethod
    def now(source: TileSource, device: torch.device) -> Image:
        """An image as it is now."""
        return Image(source, device, source.version)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that the pixels lie in, if they do."""
        return self.source.tensor if isinstance(self.source, TensorSource) else None

    @property
    def here(self) -> Tensor | None:
        """The same, where it lies on the device already: reading a tile of it takes no memory."""
        return self.tensor if self.tensor is not None and self.tensor.device == self.device else None

    @property
    def changed(self) -> bool:
        """True if the pixels are not any more those that were recorded."""
        return bool(self.version != self.source.version)

    @property
    def instances(self) -> int:
        """The number of first dimensions that count images."""
        return instances_of(self.source)

    @property
    def layout(self) -> Layout:
        return Layout.channels_first(self.source.shape, self.instances)

    def read(self, box: Box) -> Tensor:
        return read_part(self.source, self.place(box)).to(self.device, non_blocking=True)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel where the source knows that the box holds nothing else."""
        return self.source.constant(understood(self.source, self.place(box)))

    def holds(self, box: Box) -> bytes | None:
        """A key for the value of a box that is known to hold no other."""
        if self.tensor is not None:
            return None if self.background is None else self.background.at(box)
        return value_key(self.constant(box))

    @cached_property
    def background(self) -> Constants | None:
        """The constant parts of the image, if any are known; see [Note: background] in `constants`. A tensor that does
        not say when it is written to is not looked at."""
        if self.tensor is not None:
            space = len(self.source.shape) - self.instances - 1
            if self.version is None:
                return None
            return Constants.compared(self.layout, self.tensor, [SHORTEST] * space, LEAST)
        return Constants.asked(self.layout.extent, self.constant, PARTS_ON_AXIS, PARTS)

    def prefetch(self, box: Box) -> None:
        """Tell a source that wants to hear of it that a box is read next."""
        self.source.prefetch([understood(self.source, self.place(box))])

    def place(self, box: Box) -> Box:
        """A box with an axis for each dimension of images before those of space."""
        lead = self.source.shape[: self.instances]
        space = len(self.source.shape) - len(lead) - 1
        cut = iter(list(box.intervals())[space:])
        return Box.of([*(next(cut) if count > 1 else (0, count) for count in lead), *list(box.intervals())[:space]])


def background_of(images: Iterable[Image]) -> list[Constants | None]:
    """The constant parts of images. From tensors that are all blank, as examples are, nothing follows for others."""
    found = [(image.background, image.tensor is not None) for image in images]
    examples = all(tensor and (known is None or known.blank) for known, tensor in found)
    return [None if examples else known for known, _ in found]


@dataclass(frozen=True, eq=False)
class Capture:
    """The tensor behind a `Captured`: a parameter, a buffer, a target; ``version`` is the one that was recorded."""

    tensor: Tensor
    version: Version | None

    @property
    def changed(self) -> bool:
        """True if the tensor was written to since it was recorded, other than by the recording (no version)."""
        return self.version is not None and self.version != version(self.tensor)


def as_used(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A captured tensor, requiring grad if and only if it did when it was used.

    A parameter that was frozen since gets its gradient if it is free again when backward comes, as in PyTorch.
    """
    if tensor.requires_grad == requires_grad:
        return tensor
    if not requires_grad:
        return tensor.detach()
    tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            return tensor.view_as(tensor)
    finally:
        tensor.requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Bindings:
    """The images and captured tensors of a graph; see [Note: frozen] in `graph`."""

    images: dict[Value, Image] = field(default_factory=dict)
    captures: dict[Value, Capture] = field(default_factory=dict)

    def update(self, other: Bindings) -> None:
        self.images.update(other.images)
        self.captures.update(other.captures)

    def among(self, values: Container[Value]) -> Bindings:
        """The bindings of some of the values."""
        return Bindings(
            {v: image for v, image in self.images.items() if v in values},
            {v: capture for v, capture in self.captures.items() if v in values},
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """Nodes to be run, in the order in which they were recorded; ``known`` are vectors that earlier runs computed."""

    nodes: tuple[Node, ...]
    bindings: Bindings
    known: Set[Value] = frozenset()

    @property
    def images(self) -> list[Image]:
        """The images that the nodes begin with."""
        found = (self.bindings.images.get(v) for n in self.nodes for v in n.outputs)
        return [image for image in found if image is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the nodes begin with: parameters, buffers, whatever was captured."""
        found = (self.bindings.captures.get(v) for n in self.nodes for v in n.outputs)
        return [capture.tensor for capture in found if capture is not None]


class Rewriting(Protocol):
    """A change of what was recorded, which an option asks for: some operators by others, such as `split.Split`."""

    def rewrite(
        self, nodes: Sequence[Node], trained: Set[int], space: int, key: Callable[[], int]
    ) -> tuple[Node, ...]: ...


def approximation(nodes: Iterable[Node]) -> str:
    """The words of a plan for nodes that only approximate the user's; nothing where none does."""
    found = [n for n in nodes if n.op.approximation]
    if not found:
        return ""
    last = found[-1]
    return f"{last.op.approximation}: {len(found)} {last.op.kind} operators, the last of them {last.label}"


def drawn(nodes: Iterable[Node]) -> bool:
    """True if an operator was drawn for this step alone."""
    return any(n.op.drawn for n in nodes)


def vector_of(v: Value) -> Value:
    """A vector with what a map holds."""
    return Value(v.fake, None, v.requires_grad)


def gathered(v: Value, serial: int | None = None) -> Value:
    """A map as the vector that is made of it; the node that makes it may be given a number."""
    found, path = vector_of(v), v.node.path if v.node is not None else ""
    numbered = {} if serial is None else {"serial": serial}
    Node(Gather(), (v,), (found,), "gather", path, **numbered)
    return found


def image_gradient_bytes(recording: Recording) -> int:
    """The gradients of images that backward makes and leaves to the user."""
    tensors = {image.tensor for image in recording.images}
    return sum(t.nbytes for t in tensors if t is not None and t.is_leaf and t.requires_grad and t.grad is None)
