"""A recording: all that was called on lazy tensors and has not run yet; and the modules that are calling, by the stack
of Python."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.chains import with_chains
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.frame import Step
from lightning_plugin.fakes import MODES
from lightning_plugin.graph import (
    Bindings,
    Capture,
    Effect,
    Image,
    Node,
    Recording,
    Rewriting,
    Value,
    ancestors,
    next_serial,
)
from lightning_plugin.ops import Captured, Source
from lightning_plugin.options import Chains, Options
from lightning_plugin.plan import Plan
from lightning_plugin.private import FakeTensorMode, custom_function, plain, refuse_transforms, version
from lightning_plugin.source import TileSource, together

#: Of no more nodes than these, chains are made only if the user says so: the search looks at each operator.
MANY = 4000


@dataclass(frozen=True)
class Stale:
    """State of a tensor after another one that shares its memory was written to."""

    writer: str


class Engine(Protocol):
    """Runs recordings: `engine.Engine`, of which they need this."""

    @property
    def options(self) -> Options: ...
    def choose(self, recording: Recording) -> Plan: ...
    def can_move(self, tensor: Tensor) -> bool: ...
    def begin_step(self, plan: Plan, recording: Recording) -> Step: ...
    def watch_loss(self, recording: Recording, values: Sequence[Value], vectors: Mapping[Value, Tensor]) -> None: ...


@dataclass(eq=False)
class Call:
    """One call of a module that has an engine of its own: the nodes that it records have numbers after ``begin`` and
    before ``end``, which is None while the call lasts."""

    engine: Engine
    begin: int = field(default_factory=next_serial)
    end: int | None = None

    def __contains__(self, node: Node) -> bool:
        return self.begin < node.serial and (self.end is None or node.serial < self.end)


@dataclass(eq=False)
class Session:
    """All that is recorded between two executions, however many images it starts from.

    ``engine`` is that of the strategy or of the last `TiledModule`. ``calls`` are those of such modules whose nodes
    have still to run: each has its own engine.
    ``bindings`` are what the images and captured tensors are, ``vectors`` what runs have computed. ``captured`` are the
    values of real tensors, by identity and by whether they required grad when they were used. ``instances`` are the
    axes that count images. ``trained`` are the numbers of window operators that a module in train mode has called, as
    long as no run has met them: those are what is split.
    """

    engine: Engine | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    bindings: Bindings = field(default_factory=Bindings, init=False)
    vectors: dict[Value, Tensor] = field(default_factory=dict, init=False)
    captured: dict[tuple[int, bool], Value] = field(default_factory=dict, init=False)
    storages: dict[int, list[Tensor]] = field(default_factory=dict, init=False)
    extents: set[tuple[int, ...]] = field(default_factory=set, init=False)
    instances: set[int] = field(default_factory=set, init=False)
    trained: set[int] = field(default_factory=set, init=False)
    calls: list[Call] = field(default_factory=list, init=False)
    effects: list[Effect] = field(default_factory=list, init=False)
    repeats: list[Effect] = field(default_factory=list, init=False)
    #: Blocks of `torch.utils.checkpoint` that backward comes to.
    recomputed: set[Hashable] = field(default_factory=set, init=False)
    pending: list[Any] = field(default_factory=list, init=False)
    tensors: list[weakref.ref[Any]] = field(default_factory=list, init=False)
    random_calls: int = field(default=0, init=False)
    key: int | None = field(default=None, init=False)
    merged: Session | None = field(default=None, init=False)
    #: Shapes of this recording are propagated under this mode; see [Note: threads] in `fakes`.
    mode: FakeTensorMode = field(default_factory=lambda: MODES.recording, init=False)

    @contextmanager
    def faking(self) -> Iterator[None]:
        """Tensors made here are fake. None is an inference tensor: of those PyTorch shows composite operators whole."""
        with torch.inference_mode(False), self.mode:
            yield

    def recorded(
        self, wanted: Iterable[Value], splitting: Rewriting | None = None, chains: Chains | None = None
    ) -> Recording:
        """Recording of all that has to run for the wanted values: split, and with chains of equal links, as is said, or
        else as the options of the engine say."""
        options = Options() if self.engine is None else self.engine.options
        how, chains = splitting or options.splitting, chains or options.chaining
        wanted = list(wanted)
        nodes = tuple(ancestors(wanted, self.vectors))
        if how is not None:
            space = min(self.instances, default=max(map(len, self.extents), default=0))
            nodes = how.rewrite(nodes, self.trained, space, lambda: sum(self.random_key()))
            self.trained.difference_update(n.serial for n in nodes)
        elif chains == "always" or (chains == "auto" and len(nodes) > MANY):
            written = {v for v, capture in self.bindings.captures.items() if capture.version is None}
            if with_chains(nodes, wanted, written):
                nodes = tuple(ancestors(wanted, self.vectors))
        return Recording(nodes, self.bindings, frozenset(self.vectors))

    def forget(self) -> None:
        """Let go of everything that no tensor of the user leads to any more."""
        self.tensors = [ref for ref in self.tensors if ref() is not None]
        fakes = {id(t._fake): t._fake for t in (ref() for ref in self.tensors) if t is not None}
        values = []
        for fake in fakes.values():
            value = bound(fake)
            if isinstance(value, Value) and value in self.vectors:  # an ordinary tensor by now, whatever it came from
                value = self.bind_result(fake, value, self.vectors[value])
            if isinstance(value, Value):
                values.append(value)
        needed = ancestors([*values, *(v for e in self.effects for v in e.values)], self.vectors)
        reached = {*values, *(v for node in needed for v in (*node.inputs, *node.outputs))}
        self.vectors = {v: t for v, t in self.vectors.items() if v in reached}
        self.bindings = self.bindings.among(reached)
        behind = {v for node in ancestors(values) for v in node.outputs} if self.repeats else ()
        self.repeats = [e for e in self.repeats if e.values[0] in behind]
        self.captured.clear()
        self.calls = [call for call in self.calls if call.end is None or any(node in call for node in needed)]
        kept = {s: [f for f in known if id(f) in fakes] for s, known in self.storages.items()}
        self.storages = {s: known for s, known in kept.items() if known}

    def bind_result(self, fake: Tensor, value: Value, tensor: Tensor) -> Value:
        """Bind a fake tensor to a new value that is an ordinary tensor and comes from no operator."""
        with self.faking():
            like = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        plain = Value(like, None, value.requires_grad)
        self.vectors[plain] = tensor
        bind(fake, plain)
        return plain

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
        self.bindings.update(other.bindings)
        self.vectors.update(other.vectors)
        for storage, fakes in other.storages.items():
            self.storages.setdefault(storage, []).extend(fakes)
        self.extents |= other.extents
        self.instances |= other.instances
        self.trained |= other.trained
        self.calls += [call for call in other.calls if call not in self.calls]
        self.effects += other.effects
        self.repeats += other.repeats
        self.recomputed |= other.recomputed
        self.pending += other.pending
        self.tensors += other.tensors
        other.effects = []
        other.bindings, other.vectors = Bindings(), {}
        self.engine = self.engine or other.engine
        other.merged = self

    def enter(self, call: Call) -> None:
        """A call begins; what it calls in turn belongs to it."""
        if all(other.end is not None for other in self.calls):
            self.calls.append(call)
            self.engine = call.engine

    def capture(self, tensor: Tensor) -> Value:
        """The value of a real tensor; the same tensor, used in the same way, is the same value."""
        refuse_transforms()
        with plain():
            now, key = version(tensor), (id(tensor), tensor.requires_grad)
            known = self.captured.get(key)
            if known is not None and self.bindings.captures[known].version in (now, None):
                return known
            # A parameter on the meta device has no data: such a network is only planned, as if it were on the image's.
            # One that lives below that device, or waits there for a plan that says where it is to live, is used on it
            # too.
            placed = self.engine is not None and tensor.device.type == "cpu" and self.engine.can_move(tensor)
            device = self.device if tensor.is_meta or placed else tensor.device
            with self.faking():
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            value = Value(fake, None, tensor.requires_grad)
            Node(Captured(), (), (value,), "tensor")
            bind(fake, value)
            self.captured[key] = value
            self.bindings.captures[value] = Capture(tensor, now)
            return value

    def image(self, source: TileSource, fake: Tensor, requires_grad: bool = False) -> Value:
        """The map of an image as it is now, bound to a fake tensor; one without positions is a vector."""
        refuse_transforms()
        image = Image.now(source, fake.device)
        if not fake.numel():
            empty = self.capture(image.read(Box.whole(image.layout.extent)) if image.here is None else image.here)
            bind(fake, empty)
            return empty
        lies: Any = "elsewhere" if image.tensor is None else "memory" if image.here is None else "here"
        layout, axes = image.layout, len(source.shape) - image.instances - 1
        value = Value(fake, layout, requires_grad)
        op = Source(lies, source.reads_ahead, len(layout.extent) - axes, together(source))
        Node(op, (), (value,), "image")
        self.instances.update(range(axes, len(layout.extent)))
        bind(fake, value)
        self.bindings.images[value] = image
        return value

    def tensor(self, value: Value) -> Tensor:
        """The tensor that a value was captured from."""
        return self.bindings.captures[value].tensor

    def written(self, value: Value) -> Tensor:
        """A captured tensor that the recording itself is going to write."""
        tensor = self.tensor(value)
        self.bindings.captures[value] = Capture(tensor, None)
        return tensor

    def remember(self, tensor: Tensor) -> None:
        """Keep the values of a tensor that is about to be written: what is recorded reads those."""
        for value, capture in self.bindings.captures.items():
            if capture.tensor is tensor and not value.requires_grad and capture.version == version(tensor):
                copy = tensor.clone()
                self.bindings.captures[value] = Capture(copy, version(copy))

    def unsettled(self, values: Iterable[Value]) -> bool:
        """True if the recording is still to write one of these captured tensors; a run that failed writes
        nothing."""
        tensors = [self.tensor(v) for v in values if v in self.bindings.captures]
        return any(w is t for e in self.effects if not e.dormant for w in e.writes for t in tensors)

    def random_key(self) -> tuple[int, int]:
        """(the step's key, the number of this call): drawn once from torch's generator, so a seed repeats a run."""
        if self.key is None:
            self.key = int(torch.randint(2**62, (1,)).item())
        self.random_calls += 1
        return self.key, self.random_calls


def bind(fake: Tensor, value: Value | Stale) -> None:
    fake.sft_value = value  # type: ignore[attr-defined]


def bound(fake: Tensor) -> Value | Stale | None:
    return getattr(fake, "sft_value", None)


# Modules that are calling

#: The code of a module being called. Compared by identity: code made by torch.compile cannot be hashed.
_CALL = nn.Module._call_impl.__code__
_names = threading.local()


def calling() -> tuple[nn.Module | None, str]:
    """The innermost module that is being called, and its path from the outermost one that is; for plans and messages.
    Without any, none and nothing."""
    frame = sys._getframe(1)
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return None, ""
    innermost = modules[0]
    if len(modules) > 1 and getattr(modules[-1], "wraps_only", False):
        modules.pop()  # the user's paths begin at the user's module
    root = modules[-1]
    cached = getattr(_names, "cache", None)
    if cached is None or cached[0] is not root:
        cached = _names.cache = root, {id(m): n for n, m in root.named_modules()}
    paths = cached[1]
    return innermost, next((paths[id(m)] for m in modules if id(m) in paths), type(innermost).__name__)


def forget_modules() -> None:
    """Drop the names of modules after a recording, so that no module is kept alive by them."""
    _names.cache = None


def label(func: Callable[..., Any]) -> str:
    """A call as messages name it: the function, and the module that calls it."""
    _, path = calling()
    return f"{name_of_call(func)} in '{path}'" if path else name_of_call(func)


def name_of_call(func: Callable[..., Any]) -> str:
    """A function as its user knows it."""
    return getattr(custom_function(func) or func, "__name__", str(func))
