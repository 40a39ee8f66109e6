"""Streamed tensors in a run: copies are fetched for a use and let go after it; see [Note: streamed] in
`residency.homes`.

A *use* is a tiled segment, a node of a kept one, or a node of the vector part. While one goes on, what the next will
need is fetched beside it; in backward, where uses come in reverse, what the one before has left by name. A *derived*
vector is one that is made of streamed tensors only (cast to another type, transposed, cut): it is made again from a
copy wherever it is used, so that it does not stay either.
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
from lightning_plugin.private import first_order, is_deterministic, storage_key, tree_leaves, version
from lightning_plugin.progress import Progress
from lightning_plugin.residency.homes import Homes
from lightning_plugin.residency.transfer import Pending, Prefetched, Transfer, TransferQueue, transfer_to_device

#: A derived vector of fewer bytes is kept as others are.
SMALL = 1 << 12


#: A use: the place of its segment (-1 is the vector part), and the serial of its node, if it is one node's.
Use = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Saved:
    """Stand-in for a tensor in the memory of a fetched copy, for autograd to keep.

    Attributes:
        value: The value whose copy it was.
        use: The use that the copy was fetched for.
        shape, stride, offset: The tensor's place in the copy.
    """

    streams: Streams
    value: Value
    use: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        """The tensor once more; nothing is fetched beside it."""
        streams, v = self.streams, self.value
        with torch.no_grad(), torch.autocast(v.autocast_type, enabled=False), watched(streams.ledger):
            return streams.value(v).as_strided(self.shape, self.stride, self.offset)


class Streams:
    """The streamed tensors of one run, by their uses, and their copies on the device.

    ``captured`` are the tensors themselves, and ``uses`` the vectors that each use needs, in the order in which they
    are expected; with ``ahead``, copies are fetched before they are asked for. Without ``homes``, in a rehearsal,
    copies are room and no more. It leads to nothing that a run has made, since autograd's graph leads to it.
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
        self.arrivals: Prefetched[Value] = Prefetched()
        #: The tensor made of each value: a copy, or a result of copies.
        self.living: dict[Value, weakref.ref[Tensor]] = {}
        self.served = frozenset({*captured, *derived(captured, nodes)})
        self.needs = [self.leaves(v for v in vectors if v in self.served) for vectors in uses.values()]
        self.place = {use: i for i, use in enumerate(uses)}
        self.at = 0
        self.done: set[int] = set()
        #: The uses of which autograd keeps something, in order.
        self.named: list[int] = []
        self.memory: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        self.brought: list[Value] = []

    def leaves(self, values: Iterator[Value]) -> tuple[Value, ...]:
        """The streamed tensors that values are made of."""
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
    def use(self, use: Use, needed: Sequence[Value], vectors: dict[Value, Tensor]) -> Iterator[None]:
        """A use: what is ``needed`` is there as long as the block lasts, among the ``vectors`` of a frame."""
        place = self.place[use]
        if not self.needs[place]:
            yield
            return
        self.at = place
        self.begin(place)
        if self.ahead:
            following = (i for i in range(place + 1, len(self.needs)) if self.needs[i] and i not in self.done)
            self.begin(next(following, place))
        self.done.add(place)
        try:
            for v in needed:
                if v in self.served:
                    self.bring(v, vectors)
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            for v in self.brought:
                vectors.pop(v, None)
            self.brought.clear()

    def bring(self, v: Value, vectors: dict[Value, Tensor]) -> Tensor:
        """A served value as a use has it: on the device, and with its way back."""
        if v not in vectors:
            with (
                torch.set_grad_enabled(v.requires_grad),
                torch.autocast(v.autocast_type, enabled=False),
                watched(self.ledger),
            ):
                if v in self.captured:
                    made: list[Tensor] = [Copy.apply(with_requires_grad(self.captured[v], v.requires_grad), self, v)]
                    values: Sequence[Value] = (v,)
                else:
                    node = operation(v)
                    made = run(node, [self.bring(i, vectors) for i in node.inputs])
                    values = node.outputs
            for value, t in zip(values, made, strict=True):
                vectors[value] = t
                self.brought.append(value)
                self.remember(value, t)
        return vectors[v]

    def rest(self) -> None:
        """Forward is over: nothing is fetched for it any more."""
        self.arrivals.wait()

    def begin(self, use: int) -> None:
        """Begin to fetch what a use needs, unless it is there."""
        for v in self.needs[use]:
            if self.here(v) is None:
                self.arrivals.start(v, partial(self.fetching, v))

    def remember(self, v: Value, t: Tensor) -> None:
        """Know the memory of a value again, as long as it is there."""
        self.living[v] = weakref.ref(t)
        storage, key = t.untyped_storage(), storage_key(t)
        if key not in self.memory:  # what a view lies in is another value's already
            self.memory[key] = weakref.ref(storage, partial(self._gone, key)), v

    def _gone(self, key: int, _: object = None) -> None:
        self.memory.pop(key, None)

    # Copies

    def here(self, v: Value) -> Tensor | None:
        """The tensor that was made of a value, while somebody holds it."""
        ref = self.living.get(v)
        return None if ref is None else ref()

    def take(self, v: Value) -> Tensor:
        """A copy that nobody else has."""
        self.check(v)  # also of what was fetched ahead, and has waited
        return self.arrivals.take(v, partial(self.fetching, v))

    def fetching(self, v: Value) -> Pending:
        tensor, homes = self.captured[v], self.homes
        with torch.no_grad(), watched(self.ledger):
            room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=v.device)
        if homes is None:
            held = [room]
            return self.queue.send(Transfer(held, lambda: None, lambda: held[0]), ahead=False)
        return self.queue.send(transfer_to_device(room, lambda here: homes.read(tensor, here)), ahead=True)

    def check(self, v: Value) -> None:
        """Refuse to use a copy of what is not any more what the run began with."""
        if version(self.captured[v]) != self.versions[v]:
            raise RecordingError(
                f"a streamed parameter of shape {v.shape} was changed in place while a step that uses it was under way "
                "(an optimizer step between forward and backward, say). Its old value is needed: pull back before."
            )

    # Backward

    def pack(self, t: Tensor) -> Tensor | Saved:
        """Stand-in that autograd keeps for a tensor."""
        found = self.memory.get(storage_key(t)) if t.layout == torch.strided else None
        if found is None or found[1].dtype != t.dtype:
            return t
        place = bisect_left(self.named, self.at)
        if place == len(self.named) or self.named[place] != self.at:
            self.named.insert(place, self.at)
        return Saved(self, found[1], self.at, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def unpack(self, kept: Tensor | Saved) -> Tensor:
        """The tensor of a stand-in that autograd has kept."""
        if not isinstance(kept, Saved):
            return kept
        found = kept.fetch()
        if self.ahead:
            place = bisect_left(self.named, kept.use)
            if place:
                self.begin(self.named[place - 1])
        return found

    def value(self, v: Value) -> Tensor:
        """A served value once more, as a tensor without a way back."""
        found = self.here(v)
        if found is not None:
            for leaf in self.leaves(iter([v])):
                self.check(leaf)
            return found.detach()
        if v in self.captured:
            found = self.take(v)
            self.living[v] = weakref.ref(found)
            return found
        node = operation(v)
        made = run(node, [self.value(i) for i in node.inputs])
        for value, t in zip(node.outputs, made, strict=True):
            self.living[value] = weakref.ref(t)
        return made[node.outputs.index(v)]


class Copy(torch.autograd.Function):
    """A streamed tensor's copy; on the way back its gradient goes to where it lives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, streams: Streams, value: Value) -> Tensor:
        ctx.streams, ctx.value = streams, value
        return streams.take(value)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        homes, tensor = ctx.streams.homes, ctx.streams.captured[ctx.value]
        # A rehearsal's tensors have theirs, which counts nowhere.
        return tensor.grad if homes is None else homes.copy_gradient(tensor, gradient), None, None


def derived(captured: Mapping[Value, Tensor], nodes: Sequence[Node]) -> list[Value]:
    """The vectors that are made of streamed tensors only, by what gives the same each time."""
    found: dict[Value, None] = {}
    read = {v for n in nodes for v in n.inputs}
    for n in nodes:
        if not isinstance(n.op, VectorOp) or not n.inputs or not is_deterministic(n.op.call.func) or n.op.rebind:
            continue
        if all(v in captured or v in found for v in n.inputs) and all(
            v in read and v.bytes >= SMALL for v in n.outputs
        ):
            found.update(dict.fromkeys(n.outputs))
    return list(found)


def operation(v: Value) -> Node:
    assert v.node is not None and isinstance(v.node.op, VectorOp)
    return v.node


def run(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a call on vectors gives."""
    assert isinstance(node.op, VectorOp)
    return [t for t in tree_leaves(node.op.run(tensors)) if isinstance(t, Tensor)]
