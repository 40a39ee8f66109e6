"""Streamed tensors in a run: copies are fetched for a use and freed after it; see [Note: streamed] in
`residency.homes`.

A *use* is a tiled segment, a node of a kept segment, or a node on vectors. During a use, the copies for the next are
prefetched; in backward, where uses come in reverse, those for which autograd saved a reference in the use before. A
*derived* vector is made of streamed tensors only (cast to another type, transposed, sliced). It is computed again from
copies for each use, so that it is not held between uses either.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Node, Value, with_requires_grad
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import VectorOp
from lightning_plugin.private import (
    first_order,
    is_deterministic,
    storage_key,
    tree_leaves,
    version,
    without_autocast,
)
from lightning_plugin.progress import Progress
from lightning_plugin.residency.homes import Homes
from lightning_plugin.residency.transfer import Pending, Prefetched, Transfer, TransferQueue, transfer_to_device

#: Derived vectors of fewer bytes are held like other vectors.
MIN_DERIVED_BYTES = 1 << 12


#: A use: the place of its segment (-1 for a node on vectors), and the serial number of its node (-1 for all nodes).
Use = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Saved:
    """Reference that autograd saves in place of a tensor in a copy's memory.

    Attributes:
        streams: The streamed tensors of the run.
        value: The value of the copy.
        use: The index of the use.
        shape, stride, offset: The tensor's place in the copy.
    """

    streams: Streams
    value: Value
    use: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        """Return the tensor, from a copy that is alive or fetched now."""
        streams, v = self.streams, self.value
        with torch.no_grad(), without_autocast(v.autocast_type), watched(streams.ledger):
            return streams.restore(v).as_strided(self.shape, self.stride, self.offset)


class Streams:
    """The streamed tensors of one run, by their uses, and their copies on the device.

    Autograd's graph refers to this object. Therefore it refers to no results of the run.

    Attributes:
        captured: The streamed tensors.
        versions: Their versions when the run began.
        homes: Their tiers; None in a rehearsal, which allocates copies without filling them.
        queue: The transfers.
        ahead: Prefetch copies.
        prefetched: The copies that are being fetched.
        streamed: The values that are on the device during uses only: streamed tensors and derived vectors.
        needed: The streamed tensors of each use, in the order of uses.
        use_index: The index of each use in this order.
        current_use: The index of the current use.
        finished_uses: The indices of uses that have begun.
        saving_uses: The indices of uses of which autograd has saved a reference, sorted.
        tensors: The tensor of each streamed value, while it is alive.
        values_by_storage: The value in each storage, while the storage is alive.
        provided: The values that the current use was given.
    """

    def __init__(
        self,
        captured: Mapping[Value, Tensor],
        homes: Homes | None,
        uses: Mapping[Use, Sequence[Value]],
        nodes: Sequence[Node],
        ledger: Ledger | None,
        ahead: bool,
        progress: Progress,
    ) -> None:
        self.captured = captured
        self.versions = {v: version(t) for v, t in captured.items()}
        self.homes = homes
        self.queue = TransferQueue(ahead and homes is not None, progress=progress)
        self.ledger = ledger
        self.ahead = ahead
        self.prefetched: Prefetched[Value] = Prefetched()
        self.tensors: dict[Value, weakref.ref[Tensor]] = {}
        self.streamed = frozenset({*captured, *find_derived(captured, nodes)})
        self.needed = [self.sources_of(v for v in vectors if v in self.streamed) for vectors in uses.values()]
        self.use_index = {use: i for i, use in enumerate(uses)}
        self.current_use = 0
        self.begun_uses: set[int] = set()
        self.saving_uses: list[int] = []
        self.values_by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        self.provided: list[Value] = []

    def sources_of(self, values: Iterator[Value]) -> tuple[Value, ...]:
        """Return the streamed tensors that values are made of."""
        found: dict[Value, None] = {}
        stack = list(values)
        while stack:
            v = stack.pop()
            if v in self.captured:
                found[v] = None
            elif v.node is not None:
                stack += v.node.inputs
        return tuple(found)

    # Forward

    @contextmanager
    def during_use(self, use: Use, needed: Sequence[Value], vectors: dict[Value, Tensor]) -> Iterator[None]:
        """Put the streamed values among ``needed`` into a frame's ``vectors`` for the duration of a block, the use."""
        place = self.use_index[use]
        if not self.needed[place]:
            yield
            return
        self.current_use = place
        self.prefetch(place)
        if self.ahead:
            following = (i for i in range(place + 1, len(self.needed)) if self.needed[i] and i not in self.begun_uses)
            self.prefetch(next(following, place))
        self.begun_uses.add(place)
        try:
            for v in needed:
                if v in self.streamed:
                    self.provide(v, vectors)
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            for v in self.provided:
                vectors.pop(v, None)
            self.provided.clear()

    def provide(self, v: Value, vectors: dict[Value, Tensor]) -> Tensor:
        """Put a streamed value into the vectors: on the device, with its backward."""
        if v not in vectors:
            with (
                torch.set_grad_enabled(v.requires_grad),
                without_autocast(v.autocast_type),
                watched(self.ledger),
            ):
                if v in self.captured:
                    made: list[Tensor] = [
                        StreamedCopy.apply(with_requires_grad(self.captured[v], v.requires_grad), self, v)
                    ]
                    values: Sequence[Value] = (v,)
                else:
                    node = vector_node(v)
                    made = run_vector_op(node, [self.provide(i, vectors) for i in node.inputs])
                    values = node.outputs
            for value, t in zip(values, made, strict=True):
                vectors[value] = t
                self.provided.append(value)
                self.register(value, t)
        return vectors[v]

    def wait(self) -> None:
        """Wait for pending copies at the end of forward."""
        self.prefetched.wait()

    def prefetch(self, use: int) -> None:
        """Start to fetch the copies of a use that are not there."""
        for v in self.needed[use]:
            if self.find(v) is None:
                self.prefetched.start(v, partial(self.start_fetch, v))

    def register(self, v: Value, t: Tensor) -> None:
        """Register the tensor and the storage of a value, by weak references."""
        self.tensors[v] = weakref.ref(t)
        storage, key = t.untyped_storage(), storage_key(t)
        if key not in self.values_by_storage:  # the storage of a view belongs to another value
            self.values_by_storage[key] = weakref.ref(storage, partial(self._forget, key)), v

    def _forget(self, key: int, _: object = None) -> None:
        self.values_by_storage.pop(key, None)

    # Copies

    def find(self, v: Value) -> Tensor | None:
        """Return the tensor of a value if it is alive."""
        ref = self.tensors.get(v)
        return None if ref is None else ref()

    def fetch(self, v: Value) -> Tensor:
        """Return a new copy, a prefetched one if there is one."""
        self.check_version(v)  # a prefetched copy may be outdated too
        return self.prefetched.take(v, partial(self.start_fetch, v))

    def start_fetch(self, v: Value) -> Pending:
        tensor, homes = self.captured[v], self.homes
        with torch.no_grad(), watched(self.ledger):
            room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=v.device)
        if homes is None:
            held = [room]
            return self.queue.send(Transfer(held, lambda: None, lambda: held[0]), ahead=False)
        return self.queue.send(transfer_to_device(room, lambda here: homes.read(tensor, here)), ahead=True)

    def check_version(self, v: Value) -> None:
        """Raise an error if a streamed tensor was written to since the run began."""
        if version(self.captured[v]) != self.versions[v]:
            raise RecordingError(
                f"a streamed parameter of shape {v.shape} was changed in place while a step that uses it was under way "
                "(an optimizer step between forward and backward, say). Its old value is needed: pull back before."
            )

    # Backward

    def pack(self, t: Tensor) -> Tensor | Saved:
        """Replace a tensor that autograd saves by a reference, if it lies in a copy."""
        found = self.values_by_storage.get(storage_key(t)) if t.layout == torch.strided else None
        if found is None or found[1].dtype != t.dtype:
            return t
        place = bisect_left(self.saving_uses, self.current_use)
        if place == len(self.saving_uses) or self.saving_uses[place] != self.current_use:
            self.saving_uses.insert(place, self.current_use)
        return Saved(self, found[1], self.current_use, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def unpack(self, kept: Tensor | Saved) -> Tensor:
        """Return the tensor of a reference that autograd has saved, and prefetch the use before."""
        if not isinstance(kept, Saved):
            return kept
        found = kept.restore()
        if self.ahead:
            place = bisect_left(self.saving_uses, kept.use)
            if place:
                self.prefetch(self.saving_uses[place - 1])
        return found

    def restore(self, v: Value) -> Tensor:
        """Return a streamed value again, without a backward."""
        found = self.find(v)
        if found is not None:
            for leaf in self.sources_of(iter([v])):
                self.check_version(leaf)
            return found.detach()
        if v in self.captured:
            found = self.fetch(v)
            self.tensors[v] = weakref.ref(found)
            return found
        node = vector_node(v)
        made = run_vector_op(node, [self.restore(i) for i in node.inputs])
        for value, t in zip(node.outputs, made, strict=True):
            self.tensors[value] = weakref.ref(t)
        return made[node.outputs.index(v)]


class StreamedCopy(torch.autograd.Function):
    """Copy of a streamed tensor; its gradient goes to the tensor's tier."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, streams: Streams, value: Value) -> Tensor:
        ctx.streams, ctx.value = streams, value
        ctx.set_materialize_grads(False)
        return streams.fetch(value)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        homes, tensor = ctx.streams.homes, ctx.streams.captured[ctx.value]
        # A rehearsal's tensors have a gradient already, which is not counted.
        return tensor.grad if homes is None else homes.copy_gradient(tensor, gradient), None, None


def find_derived(captured: Mapping[Value, Tensor], nodes: Sequence[Node]) -> list[Value]:
    """Find the vectors that are made of streamed tensors only, by deterministic operators."""
    found: dict[Value, None] = {}
    read = {v for n in nodes for v in n.inputs}
    for n in nodes:
        if not isinstance(n.op, VectorOp) or not n.inputs or not is_deterministic(n.op.call.func):
            continue
        if all(v in captured or v in found for v in n.inputs) and all(
            v in read and v.bytes >= MIN_DERIVED_BYTES for v in n.outputs
        ):
            found.update(dict.fromkeys(n.outputs))
    return list(found)


def vector_node(v: Value) -> Node:
    assert v.node is not None and isinstance(v.node.op, VectorOp)
    return v.node


def run_vector_op(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a call on vectors, and return the tensors among its results."""
    assert isinstance(node.op, VectorOp)
    return [t for t in tree_leaves(node.op.run(tensors)) if isinstance(t, Tensor)]
