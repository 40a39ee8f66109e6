"""A recording: all that was called on lazy tensors and has not run yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_plugin.capture.buffers import ordinary, plain
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.team import Team
from lightning_plugin.fakes import MODES, unbound
from lightning_plugin.graph import Effect, Node, Value, ancestors
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger
from lightning_plugin.ops import Captured, Source
from lightning_plugin.plan import Plan
from lightning_plugin.source import TileSource, version_of


@dataclass(frozen=True)
class Stale:
    """What a tensor is bound to after another tensor that shares its memory was written to."""

    writer: str


class ExecutionSettings(Protocol):
    """How a recording is to be run: `settings.Settings` to a recording, which knows nothing of budgets."""

    team: Team | None

    @property
    def folder(self) -> str | None: ...
    def choose(self, nodes: Sequence[Node]) -> Plan: ...
    def begin(self, plan: Plan, nodes: Sequence[Node]) -> Ledger: ...


@dataclass(eq=False)
class Session:
    """All that is recorded between two executions, however many images it starts from.

    ``settings`` is what the strategy or `TiledModule` said about budget and grids; the executor hands it on.
    ``execute`` runs what is recorded: it computes the value that is wanted, if any, and all that is waiting.
    ``captured`` are the values of real tensors, by identity and by whether they required grad when they were used.
    """

    execute: Callable[[Session, Value | None, Sequence[Value]], Tensor]
    settings: ExecutionSettings | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    captured: dict[tuple[int, bool], Value] = field(default_factory=dict)
    storages: dict[int, list[Tensor]] = field(default_factory=dict)
    extents: set[tuple[int, ...]] = field(default_factory=set)
    effects: list[Effect] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    tensors: list[weakref.ref[Any]] = field(default_factory=list)
    random_calls: int = 0
    key: int | None = None
    merged: Session | None = None
    #: Shapes of this recording are propagated under this mode; see [Note: threads] in `fakes`.
    mode: FakeTensorMode = field(default_factory=lambda: MODES.recording)

    def __del__(self) -> None:
        for node in self.nodes:
            sever(node)

    def forget(self) -> None:
        """Let go of everything that no tensor of the user leads to any more.

        Values and nodes point at each other. Were they left to the garbage collector, a step's images would live on
        until it comes by.
        """
        self.tensors = [ref for ref in self.tensors if ref() is not None]
        fakes = {id(t._fake): t._fake for t in (ref() for ref in self.tensors) if t is not None}
        values = [v for v in map(bound, fakes.values()) if isinstance(v, Value)]
        for v in values:
            if v.real is not None and not v.is_map:  # an ordinary tensor by now, whatever it came from
                v.node, v.fake = None, unbound(v.shape, v.dtype, v.device)
        needed = ancestors([*values, *(v for e in self.effects for v in e.values)])
        given = (v.node for node in needed for v in node.inputs if v.node is not None)
        reached = {node.serial for node in needed} | {n.serial for n in given if isinstance(n.op, Captured)}
        for node in self.nodes:
            if node.serial not in reached:
                sever(node, fakes)
        self.nodes = [node for node in self.nodes if node.serial in reached]
        self.captured.clear()
        kept = {s: [f for f in known if id(f) in fakes] for s, known in self.storages.items()}
        self.storages = {s: known for s, known in kept.items() if known}

    @property
    def alive(self) -> bool:
        """Whether somebody still holds a result that was recorded here."""
        return any(ref() is not None for ref in self.pending)

    def root(self) -> Session:
        session = self
        while session.merged is not None:
            session = session.merged
        return session

    def absorb(self, other: Session) -> None:
        """Go on as one recording after values of two met in one call."""
        if other is self:
            return
        if other.mode is not self.mode:
            raise RecordingError(
                "tensors recorded in two threads met in one call. Record a step in one thread, or take the value of "
                "one of them first (.item(), materialize(x))."
            )
        self.captured.update(other.captured)
        for storage, fakes in other.storages.items():
            self.storages.setdefault(storage, []).extend(fakes)
        self.extents |= other.extents
        self.effects += other.effects
        self.pending += other.pending
        self.nodes += other.nodes
        self.tensors += other.tensors
        other.nodes, other.effects = [], []
        self.settings = self.settings or other.settings
        other.merged = self

    def capture(self, tensor: Tensor) -> Value:
        """The value of a real tensor; the same tensor, used in the same way, is the same value."""
        with plain():
            return self._capture(tensor)

    def _capture(self, tensor: Tensor) -> Value:
        version = 0 if tensor.is_inference() else tensor._version
        key = id(tensor), tensor.requires_grad
        known = self.captured.get(key)
        if known is not None and known.node is not None and known.node.op.version in (version, -1):  # type: ignore[attr-defined]
            return known
        # A parameter on the meta device has no data: such a network is only planned, as if it were on the image's.
        device = self.device if tensor.is_meta else tensor.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        value = Value(fake, None, tensor.requires_grad)
        value.node = Node(Captured(tensor, version), (), (value,), "tensor")
        bind(fake, value)
        self.captured[key] = value
        self.nodes.append(value.node)
        return value

    def settle(self, values: Iterable[Value]) -> None:
        """Run what is recorded, if one of these captured tensors is still to be written by it."""
        tensors = [v.node.op.tensor for v in values if v.node is not None and isinstance(v.node.op, Captured)]
        if any(w is t for e in self.effects for w in e.writes for t in tensors):
            self.run()  # and forget nothing: a call is being recorded

    def flush(self) -> None:
        """Run what is recorded, for the sake of what it does besides returning results."""
        self.run()
        self.forget()

    def run(self, wanted: Value | None = None) -> Tensor:
        """Run what is recorded: the value that is wanted, if any, and all that is waiting beside it."""
        waiting = [t for ref in self.pending if (t := ref()) is not None]
        self.pending = [ref for ref in self.pending if ref() is not None]
        values = [t._value for t in waiting if isinstance(bound(t._fake), Value)]
        return self.execute(self, wanted, [v for v in values if v.real is None])

    def abandon(self) -> None:
        """The recording is only looked at and never run: nothing awaits it."""
        ordinary(b for e in self.effects for b in e.writes)
        self.effects.clear()

    def random_key(self) -> tuple[int, int]:
        """(the step's key, the number of this call): drawn once from torch's generator, so a seed repeats a run."""
        if self.key is None:
            self.key = int(torch.randint(2**62, (1,)).item())
        self.random_calls += 1
        return self.key, self.random_calls


def sever(node: Node, alive: Container[int] = ()) -> None:
    """Take a node apart that nothing leads to any more; ``alive`` are the ids of fakes that tensors still use."""
    for v in node.outputs:
        v.node = None
        if id(v.fake) not in alive and bound(v.fake) is v:
            del v.fake.sft_value  # type: ignore[attr-defined]
    node.inputs = node.outputs = ()


def bind(fake: Tensor, value: Value | Stale) -> None:
    fake.sft_value = value  # type: ignore[attr-defined]


def bound(fake: Tensor) -> Value | Stale | None:
    return getattr(fake, "sft_value", None)


def source_node(image: TileSource, fake: Tensor, requires_grad: bool = False) -> Node:
    """The map of an image as it is now, bound to a fake tensor."""
    value = Value(fake, Layout.channels_first(image.shape), requires_grad)
    value.node = Node(Source(image, fake.device, version_of(image)), (), (value,), "image")
    bind(fake, value)
    return value.node
