"""Graph of a recorded network: values, nodes, and bindings to images and captured tensors.

A *map* is a value whose layout has axes; it is held whole only if a plan says so. A *vector* is any other value: it is
small, and an ordinary tensor once it is computed. Nodes point at their inputs, so a graph is all that can be reached
from the wanted values, without a container.

[Note: frozen] A graph holds no data and never changes. `Bindings` name its images and captured tensors, and the `Frame`
of a run holds results. So a graph can be run, rehearsed during a run, and run again. Values and nodes are in reference
cycles; these hold no data, so that no tensor waits for the garbage collector.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_plugin.boxes import Box
from lightning_plugin.constants import MIN_CELL_SIDE, MIN_CONSTANT_SHARE, Constants, constant_key
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Gather, Op
from lightning_plugin.private import BatchNormBase, Version, storage_key, version
from lightning_plugin.source import TensorSource, TileSource, instances_of, read_part, understood

#: Distance of the serial numbers of two nodes; the numbers between them are for the nodes of a chain.
SERIAL_STEP = 32

_serial = itertools.count(step=SERIAL_STEP)


def next_serial() -> int:
    """Return a serial number greater than those of all nodes recorded so far."""
    return next(_serial)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """Tensor of the recorded network.

    Attributes:
        fake: Tensor without data that has the shape, dtype and device.
        layout: Axes in the dimensions of a map; None for a vector.
        requires_grad: As PyTorch's.
        node: The node that makes the value.
    """

    fake: Tensor
    layout: Layout | None
    requires_grad: bool
    node: Node | None = field(default=None, init=False, repr=False)  # it would show all nodes before it

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
        """The device type whose autocast state applies."""
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
    """Call of an operator.

    Attributes:
        op: The operator of the rule.
        inputs: Values that it reads; its ``maps`` and its ``vectors``.
        outputs: Values that it makes.
        name: Name of the operator in messages.
        path: Path of the module that called it.
        inplace: The in-place form, if the user's code used it: it runs if no other node reads the input.
        serial: Number in the order of recording.
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
            object.__setattr__(v, "node", self)  # a node and its outputs refer to each other

    @property
    def label(self) -> str:
        """Name of the operator and of its module in messages."""
        return f"{self.name} in '{self.path}'" if self.path else self.name


@dataclass(eq=False)
class Effect:
    """Side effect of recorded code, applied once when its values are known, such as an update of running statistics.

    Attributes:
        values: The values that it needs.
        run: Function of the tensors that it writes and of the values' results.
        writes: Captured tensors that it writes.
        dormant: True after a run that failed: its values are not computed for its sake any more, and it is applied if
            they are.
        block: The block of `torch.utils.checkpoint` in which it was recorded: backward applies it again.
        norm: The BatchNorm of ``block``'s update, which counts its batches.
        results: Results of the values, for backward.
        last_pass: The last backward pass in which it was applied.
        serial: Serial number, in one order with those of nodes.
    """

    values: tuple[Value, ...]
    run: Callable[..., None]
    writes: tuple[Tensor, ...] = ()
    dormant: bool = False
    block: Hashable = None
    norm: BatchNormBase | None = None
    results: Sequence[Tensor] = ()
    last_pass: int = -1
    serial: int = field(default_factory=next_serial)


def ancestors(wanted: Iterable[Value], known: Container[Value] = ()) -> list[Node]:
    """Return the nodes that make the wanted values, without those behind known values, in the order of recording."""
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

#: Most cells in which an image is asked for background, on an axis and in all.
MAX_CELLS_ON_AXIS, MAX_CELLS = 64, 1 << 13


@dataclass(frozen=True, eq=False)
class Image:
    """Pixels of a `Source`, which are moved to ``device``; ``version`` is that of the recording."""

    source: TileSource
    device: torch.device
    version: Any = None

    @staticmethod
    def of(source: TileSource, device: torch.device) -> Image:
        """Make the image of a source in its current version."""
        return Image(source, device, source.version)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that holds the pixels; None for other sources."""
        return self.source.tensor if isinstance(self.source, TensorSource) else None

    @property
    def on_device(self) -> Tensor | None:
        """The tensor that holds the pixels, if it is on the device: a tile of it is a view."""
        return self.tensor if self.tensor is not None and self.tensor.device == self.device else None

    @property
    def changed(self) -> bool:
        """True if the pixels have changed since the recording."""
        return bool(self.version != self.source.version)

    @property
    def instances(self) -> int:
        """The number of first dimensions that count images."""
        return instances_of(self.source)

    @property
    def layout(self) -> Layout:
        return Layout.channels_first(self.source.shape, self.instances)

    def read(self, box: Box) -> Tensor:
        return read_part(self.source, self.source_box(box)).to(self.device, non_blocking=True)

    def constant(self, box: Box) -> Tensor | None:
        """Return the value of each channel if the source knows that the box is constant."""
        return self.source.constant(understood(self.source, self.source_box(box)))

    def constant_key(self, box: Box) -> bytes | None:
        """Return a key of the value of a box that is known to be constant."""
        if self.tensor is not None:
            return None if self.background is None else self.background.key_of_box(box)
        return constant_key(self.constant(box))

    @cached_property
    def background(self) -> Constants | None:
        """The constant parts of the image, if any are known; see [Note: background] in `constants`. Tensors without a
        version (inference tensors) are not compared."""
        sides = [MIN_CELL_SIDE] * (len(self.source.shape) - self.instances - 1)
        if self.tensor is not None:
            if self.version is None:
                return None
            return Constants.from_tensor(self.layout, self.tensor, sides, MIN_CONSTANT_SHARE)
        return Constants.from_source(self.layout.extent, self.constant, MAX_CELLS_ON_AXIS, MAX_CELLS, sides)

    def prefetch(self, box: Box) -> None:
        """Announce to the source that a box is read next."""
        self.source.prefetch([understood(self.source, self.source_box(box))])

    def source_box(self, box: Box) -> Box:
        """Return a box of the source: its axes are the dimensions of images, then those of space."""
        lead = self.source.shape[: self.instances]
        space = len(self.source.shape) - len(lead) - 1
        cut = iter(list(box.intervals())[space:])
        return Box.of([*(next(cut) if count > 1 else (0, count) for count in lead), *list(box.intervals())[:space]])


def background_of(images: Iterable[Image]) -> list[Constants | None]:
    """Return the constant parts of images; none if all are constant tensors, which stand for other images in plans."""
    found = [(image.background, image.tensor is not None) for image in images]
    examples = all(tensor and (known is None or known.is_constant) for known, tensor in found)
    return [None if examples else known for known, _ in found]


@dataclass(frozen=True, eq=False)
class Capture:
    """Tensor of a `Captured`: a parameter, a buffer, a target; ``version`` is that of the recording."""

    tensor: Tensor
    version: Version | None

    @property
    def changed(self) -> bool:
        """True if the tensor was written to since it was recorded; one that the recording writes has no version."""
        return self.version is not None and self.version != version(self.tensor)


def with_requires_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a captured tensor with the ``requires_grad`` of the time of use.

    A parameter that was frozen since gets its gradient if it requires grad again in backward, as in PyTorch.
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

    def restrict(self, values: Container[Value]) -> Bindings:
        """Return the bindings of some of the values."""
        return Bindings(
            {v: image for v, image in self.images.items() if v in values},
            {v: capture for v, capture in self.captures.items() if v in values},
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """Nodes to run, in the order of recording.

    Attributes:
        nodes: The nodes.
        bindings: The images and captured tensors.
        known: Vectors that earlier runs computed.
        derived: What was derived from the nodes alone, by whoever derived it; it lives as long as they do.
        unrecorded: Parameters on the device of whose memory no node reads all: weights may be made of them in each
            call, as standardised ones are.
    """

    nodes: tuple[Node, ...]
    bindings: Bindings
    known: Set[Value] = frozenset()
    derived: dict[Hashable, Any] = field(default_factory=dict)
    unrecorded: Sequence[Tensor] = ()

    def with_parameters(self, parameters: Iterable[Tensor], device: torch.device) -> Recording:
        """Return the recording with those of a module's parameters that lie on the device and are not recorded."""
        tensors = self.tensors
        known = set(map(id, tensors))
        others = [p for p in parameters if id(p) not in known]
        if not others:  # as of most modules, in each step
            return self
        recorded: Counter[int] = Counter()  # bytes of each storage
        for t in tensors:
            recorded[storage_key(t)] += t.nbytes
        there = [p for p in others if not is_lazy(p) and p.layout is torch.strided]
        there = [p for p in there if p.is_meta or p.device.type == device.type]
        found = {key: p for p in there if recorded[key := storage_key(p)] < p.nbytes}
        return replace(self, unrecorded=tuple(found.values()))

    @property
    def given(self) -> list[Value]:
        """The values that no node computes: images and captured tensors."""
        if "given" not in self.derived:
            self.derived["given"] = [v for n in self.nodes if not n.inputs for v in n.outputs]
        return self.derived["given"]  # type: ignore[no-any-return]

    @property
    def images(self) -> list[Image]:
        """The images that the nodes read."""
        images = self.bindings.images
        return [images[v] for v in self.given if v in images]

    @property
    def tensors(self) -> list[Tensor]:
        """The captured tensors that the nodes read (parameters, buffers, others), and the parameters not recorded."""
        captures = self.bindings.captures
        return [*(captures[v].tensor for v in self.given if v in captures), *self.unrecorded]

    @property
    def node_bytes(self) -> tuple[int, int]:
        """The bytes of what nodes read and make: of all of them, and of the largest."""
        if "node bytes" not in self.derived:
            sizes = [sum(v.bytes for v in (*node.inputs, *node.outputs)) for node in self.nodes]
            self.derived["node bytes"] = sum(sizes), max(sizes, default=0)
        return self.derived["node bytes"]  # type: ignore[no-any-return]


class Rewriting(Protocol):
    """Option that replaces recorded operators by others, such as `split.Split`."""

    def rewrite(
        self, nodes: Sequence[Node], trained: Set[int], space: int, key: Callable[[], int]
    ) -> tuple[Node, ...]: ...


def approximation(nodes: Iterable[Node]) -> str:
    """Describe the nodes that approximate the user's, for plans; empty if there are none."""
    found = [n for n in nodes if n.op.approximation]
    if not found:
        return ""
    last = found[-1]
    return f"{last.op.approximation}: {len(found)} {last.op.kind} operators, the last of them {last.label}"


def has_drawn(nodes: Iterable[Node]) -> bool:
    """True if an operator has random parameters of one step."""
    return any(n.op.drawn for n in nodes)


def as_vector(v: Value) -> Value:
    """Make the value of a map as a vector."""
    return Value(v.fake, None, v.requires_grad)


def gather(v: Value, serial: int | None = None) -> Value:
    """Add a node that makes a vector of a map; by default it gets the next serial number."""
    found, path = as_vector(v), v.node.path if v.node is not None else ""
    numbered = {} if serial is None else {"serial": serial}
    Node(Gather(), (v,), (found,), "gather", path, **numbered)
    return found


def image_gradient_bytes(recording: Recording) -> int:
    """Return the bytes of images' gradients that backward will allocate."""
    tensors = {image.tensor for image in recording.images}
    return sum(t.nbytes for t in tensors if t is not None and t.is_leaf and t.requires_grad and t.grad is None)
