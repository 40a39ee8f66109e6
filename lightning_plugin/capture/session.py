"""Session: the calls on lazy tensors that are recorded and have not run; and the module that is being called."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.chains import replace_by_chains
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
    gather,
)
from lightning_plugin.layout import Axis
from lightning_plugin.ops import Captured, Source, VectorOp
from lightning_plugin.options import Chains, Options
from lightning_plugin.plan import Plan
from lightning_plugin.private import (
    FakeTensorMode,
    become,
    custom_function,
    refuse_transforms,
    storage_key,
    version,
    without_torch_function,
)
from lightning_plugin.source import TensorSource, TileSource, together

#: Recordings of more nodes get chains by default: the search looks at each operator.
CHAINS_FROM_NODES = 4000


@dataclass(frozen=True)
class Stale:
    """State of a tensor whose memory ``writer`` has written to through another tensor."""

    writer: str


class Engine(Protocol):
    """The part of `engine.Engine` that recordings use."""

    @property
    def options(self) -> Options: ...
    @property
    def transcripts(self) -> Any: ...
    @property
    def module_parameters(self) -> Iterable[Tensor]: ...
    def choose(self, recording: Recording) -> Plan: ...
    def can_move(self, tensor: Tensor) -> bool: ...
    def begin_step(self, plan: Plan, recording: Recording) -> Step: ...
    def watch_loss(self, recording: Recording, values: Sequence[Value], vectors: Mapping[Value, Tensor]) -> None: ...


@dataclass(eq=False)
class ModuleCall:
    """Call of a module that has an engine of its own.

    Attributes:
        engine: The module's engine.
        is_open: False after the call.
        serials: Serial numbers of the nodes that it has recorded.
    """

    engine: Engine
    is_open: bool = True
    serials: set[int] = field(default_factory=set)

    def __contains__(self, node: Node) -> bool:
        return node.serial in self.serials


@dataclass(eq=False)
class Log:
    """Changes that recording a call makes to its session; see `transcript`.

    Attributes:
        axes: Axes that count images: those before the call, then those that it adds.
        binds: Bindings of fake tensors, in order.
        stored: Fake tensors by storage.
        serials: Serial numbers of the nodes.
        extents: Extents of the maps.
        captured: The captured tensors.
        effects: Effects, each with the captured tensors that it writes.
        settled: Captured tensors that no effect has still to write.
        draws: Captured tensors that the call draws itself, each with the function that draws it.
        random_calls: Number of random operators.
        is_repeatable: False if the call has to be recorded in each step.
    """

    axes: frozenset[int]
    binds: list[tuple[Tensor, Value | Stale]] = field(default_factory=list)
    stored: list[tuple[int, Tensor]] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    extents: set[tuple[int, ...]] = field(default_factory=set)
    captured: set[Value] = field(default_factory=set)
    effects: list[tuple[Effect, Sequence[Value]]] = field(default_factory=list)
    settled: list[Value] = field(default_factory=list)
    draws: list[tuple[Value, Callable[[Session], Tensor]]] = field(default_factory=list)
    random_calls: int = 0
    is_repeatable: bool = True


class _Logs(threading.local):
    """The log of the call that a thread records, if it has one."""

    now: Log | None = None


logs = _Logs()


@contextmanager
def logging_to(log: Log | None) -> Iterator[None]:
    """Log the recording of a call."""
    before, logs.now = logs.now, log
    try:
        yield
    finally:
        logs.now = before


class Transcript(Protocol):
    """The part of `transcript.Transcript` that sessions use."""

    place: Any

    def rewind(self, session: Session) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Session:
    """Calls recorded between two executions, on one image or several.

    Attributes:
        engine: The engine of the strategy or of the last `TiledModule`.
        device: The device of tiles.
        bindings: The images and the captured tensors.
        vectors: Results of earlier runs.
        captured_values: Values of real tensors, by identity and ``requires_grad`` at the time of use.
        fakes_by_storage: Fake tensors that share a storage.
        extents: Spatial extents of the recorded maps.
        instance_axes: Axes that count images.
        windows_in_training: Serial numbers of window operators that modules in train mode have called since the last
            run: Split-CNN splits no others.
        calls: Calls of modules with engines of their own, whose nodes have not run.
        effects: Effects that wait for their values.
        recomputed_effects: Effects in blocks of `torch.utils.checkpoint` that backward applies again.
        recomputed_blocks: Blocks of `torch.utils.checkpoint` that backward recomputes.
        lazy_tensors: The lazy tensors of the session.
        random_calls: Number of random operators so far.
        keys: Key of the step's random numbers, on each device that reads it.
        merged_into: The session that has taken over this one's calls.
        transcript: The calls of the step, by which they are compared with those of earlier steps; None if they are not.
        has_calls: True if a call was recorded, or compared.
        fake_mode: Mode in which shapes are propagated; see [Note: threads] in `fakes`.
    """

    engine: Engine | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    bindings: Bindings = field(default_factory=Bindings, init=False)
    vectors: dict[Value, Tensor] = field(default_factory=dict, init=False)
    captured_values: dict[tuple[int, bool], Value] = field(default_factory=dict, init=False)
    fakes_by_storage: dict[int, list[Tensor]] = field(default_factory=dict, init=False)
    extents: set[tuple[int, ...]] = field(default_factory=set, init=False)
    instance_axes: set[int] = field(default_factory=set, init=False)
    windows_in_training: set[int] = field(default_factory=set, init=False)
    calls: list[ModuleCall] = field(default_factory=list, init=False)
    effects: list[Effect] = field(default_factory=list, init=False)
    recomputed_effects: list[Effect] = field(default_factory=list, init=False)
    recomputed_blocks: set[Hashable] = field(default_factory=set, init=False)
    lazy_tensors: list[weakref.ref[Any]] = field(default_factory=list, init=False)
    random_calls: int = field(default=0, init=False)
    keys: dict[torch.device, Tensor] = field(default_factory=dict, init=False)
    merged_into: Session | None = field(default=None, init=False)
    transcript: Transcript | None = field(default=None, init=False)
    has_calls: bool = field(default=False, init=False)
    fake_mode: FakeTensorMode = field(default_factory=lambda: MODES.recording, init=False)

    @contextmanager
    def fake_tensors(self) -> Iterator[None]:
        """Make new tensors fake, and none an inference tensor: PyTorch does not decompose composite operators on
        those."""
        with torch.inference_mode(False), self.fake_mode:
            yield

    def recording_of(
        self, wanted: Iterable[Value], splitting: Rewriting | None = None, chains: Chains | None = None
    ) -> Recording:
        """Return the recording of all nodes that have to run for some values.

        Args:
            wanted: The values.
            splitting: Split-CNN; by default the engine's option.
            chains: Whether equal links become chains; by default the engine's option.
        """
        options = Options() if self.engine is None else self.engine.options
        splitting, chains = splitting or options.splitting, chains or options.chaining
        wanted = list(wanted)
        place = None if self.transcript is None else self.transcript.place
        key = (tuple(wanted), frozenset(self.vectors))
        if place is not None and key in place.recordings:
            nodes, derived = place.recordings[key]
            return Recording(nodes, self.bindings, key[1], derived)
        nodes = tuple(ancestors(wanted, self.vectors))
        if splitting is not None:
            space = min(self.instance_axes, default=max(map(len, self.extents), default=0))
            nodes = splitting.rewrite(nodes, self.windows_in_training, space, self.split_key)
            self.windows_in_training.difference_update(n.serial for n in nodes)
        elif chains == "always" or (chains == "auto" and len(nodes) > CHAINS_FROM_NODES):
            written = {v for v, capture in self.bindings.captures.items() if capture.version is None}
            if replace_by_chains(nodes, wanted, written):
                nodes = tuple(ancestors(wanted, self.vectors))
            if self.transcript is not None:  # chains replace recorded nodes
                self.transcript.close()
                place = None
        recording = Recording(nodes, self.bindings, key[1])
        if place is not None:
            place.keep(place.recordings, key, (nodes, recording.derived))
        return recording

    def gathered(self, value: Value) -> Value:
        """Return the value of a map as one tensor."""
        place = None if self.transcript is None else self.transcript.place
        if place is None:
            return gather(value)
        if value not in place.gathers:
            place.keep(place.gathers, value, gather(value))
        return place.gathers[value]

    def drop_unsound_results(self) -> None:
        """Drop results that a later run must not take over, and computes again.

        - Results without the graph that was recorded for them: the statistics of a BatchNorm that ran as one call of
          PyTorch's kernel. An operator on vectors ran with ordinary autograd, which makes no graph for some.
        - Captured tensors: a parameter that was frozen when it was used may require grad by then.
        """

        def is_sound(v: Value, t: Tensor) -> bool:
            op = None if v.node is None else v.node.op
            return isinstance(op, VectorOp) or (
                (t.requires_grad or not v.requires_grad) and not isinstance(op, Captured)
            )

        self.vectors = {v: t for v, t in self.vectors.items() if is_sound(v, t)}

    @property
    def alive(self) -> list[Any]:
        """The lazy tensors that the user's code holds."""
        return [t for ref in self.lazy_tensors if (t := ref()) is not None]

    def drop_unreachable(self) -> None:
        """Make the computed lazy tensors ordinary ones. Drop nodes, results and bindings that no lazy tensor and no
        effect depends on."""
        given = [c.tensor for c in self.bindings.captures.values()] if self.vectors else []
        users = {storage_key(t) for t in given if t.layout is torch.strided}  # storages to which the user may write
        for t in self.alive:
            value = binding_of(t._fake)
            if isinstance(value, Value) and value in self.vectors:
                users.add(storage_key(self.vectors[value]))
                self.replace(t, self.vectors[value])
        fakes = {id(t._fake): t._fake for t in self.alive}
        values = [value for fake in fakes.values() if isinstance(value := binding_of(fake), Value)]
        needed = ancestors([*values, *(v for e in self.effects for v in e.values)], self.vectors)
        reached = {*values, *(v for node in needed for v in (*node.inputs, *node.outputs))}
        kept = {v: t for v, t in self.vectors.items() if v in reached}
        with torch.inference_mode(False), torch.enable_grad():  # recorded nodes will read what is there now
            self.vectors = {v: t.clone() if storage_key(t) in users else t for v, t in kept.items()}
        self.bindings = self.bindings.restrict(reached)
        behind = {v for node in ancestors(values) for v in node.outputs} if self.recomputed_effects else ()
        self.recomputed_effects = [e for e in self.recomputed_effects if e.values[0] in behind]
        self.captured_values.clear()
        self.calls = [call for call in self.calls if call.is_open or any(node in call for node in needed)]
        stored = {s: [f for f in known if id(f) in fakes] for s, known in self.fakes_by_storage.items()}
        self.fakes_by_storage = {s: known for s, known in stored.items() if known}
        if self.transcript is not None and not self.effects:
            self.transcript.rewind(self)

    def replace(self, lazy: Any, result: Tensor) -> None:
        """Make a lazy tensor the ordinary tensor of its result, which holds no session."""
        self.lazy_tensors = [ref for ref in self.lazy_tensors if ref() is not lazy]
        given: tuple[Image | Capture, ...] = (*self.bindings.captures.values(), *self.bindings.images.values())
        if result.requires_grad and any(g.tensor is result for g in given):
            with torch.enable_grad():
                result = result.view_as(result)  # the user's own tensor stays as it is
        del lazy._fake, lazy._session
        become(lazy, result)

    def is_row(self, value: Value) -> bool:
        """True for a map with one entry for each image or patch and no axis of space."""
        dims = () if value.layout is None else value.layout.dims
        axes = {factor.index for dim in dims for factor in dim if isinstance(factor, Axis)}
        return bool(axes) and axes <= self.instance_axes

    def root(self) -> Session:
        """Return the session that this one was merged into, or itself."""
        session = self
        while session.merged_into is not None:
            session = session.merged_into
        return session

    def merge(self, other: Session) -> None:
        """Take over the recorded calls of another session: values of both were used in one call."""
        if other is self:
            return
        if other.fake_mode is not self.fake_mode:
            raise RecordingError(
                "tensors recorded in two threads were used in one call. Record a step in one thread, or take the value "
                "of one of them first (.item(), materialize(x))."
            )
        if other.transcript is not self.transcript:
            for transcript in (self.transcript, other.transcript):
                if transcript is not None:
                    transcript.place = None
        self.has_calls |= other.has_calls
        self.captured_values.update(other.captured_values)
        self.bindings.update(other.bindings)
        self.vectors.update(other.vectors)
        for storage, fakes in other.fakes_by_storage.items():
            self.fakes_by_storage.setdefault(storage, []).extend(fakes)
        self.extents |= other.extents
        self.instance_axes |= other.instance_axes
        self.windows_in_training |= other.windows_in_training
        self.calls += [call for call in other.calls if call not in self.calls]
        self.effects += other.effects
        self.recomputed_effects += other.recomputed_effects
        self.recomputed_blocks |= other.recomputed_blocks
        self.lazy_tensors += other.lazy_tensors
        other.effects = []
        other.bindings, other.vectors = Bindings(), {}
        self.engine = self.engine or other.engine
        other.merged_into = self

    def begin_call(self, call: ModuleCall) -> None:
        """Begin a call, unless it lies within another one, to which its nodes then belong."""
        if not any(other.is_open for other in self.calls):
            self.calls.append(call)
            self.engine = call.engine

    def add_stored(self, key: int, fake: Tensor) -> bool:
        """Add a fake tensor to those of a storage; return False if it is one of them."""
        known = self.fakes_by_storage.setdefault(key, [])
        if any(f is fake for f in known):
            return False
        known.append(fake)
        return True

    def add_nodes(self, serials: Iterable[int]) -> None:
        """Add nodes, by their serial numbers, to the calls that are open."""
        for call in self.calls:
            if call.is_open:
                call.serials.update(serials)

    def capture(self, tensor: Tensor) -> Value:
        """Return the value of a real tensor: one value for the tensor as long as it is unchanged."""
        refuse_transforms(tensor)
        with without_torch_function():
            known = self.known_capture(tensor)
            if known is None:
                with self.fake_tensors():
                    fake = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device_of(tensor)
                    )
                known = Value(fake, None, tensor.requires_grad)
                Node(Captured(), (), (known,), "tensor")
                bind(fake, known)
                self.bind_capture(known, tensor)
            if logs.now is not None:
                logs.now.captured.add(known)
            return known

    def known_capture(self, tensor: Tensor) -> Value | None:
        """Return the value of a real tensor that was captured before, if it is unchanged."""
        known = self.captured_values.get((id(tensor), tensor.requires_grad))
        if known is not None and self.bindings.captures[known].version in (version(tensor), None):
            return known
        return None

    def bind_capture(self, value: Value, tensor: Tensor) -> None:
        """Bind a value to a real tensor."""
        self.captured_values[id(tensor), tensor.requires_grad] = value
        self.bindings.captures[value] = Capture(tensor, version(tensor))

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device on which a real tensor is used.

        A parameter on the meta device has no data: such a network is only planned, as if on the image's device. A
        parameter that the engine streams, or has still to place, is used on the image's device too.
        """
        moves = self.engine is not None and tensor.device.type == "cpu" and self.engine.can_move(tensor)
        return self.device if tensor.is_meta or moves else tensor.device

    def bind_image(self, source: TileSource, fake: Tensor, requires_grad: bool = False) -> Value:
        """Bind a fake tensor to the value of an image in its current version; an empty image is a vector."""
        refuse_transforms(source.tensor if isinstance(source, TensorSource) else None)
        image = Image.of(source, fake.device)
        if not fake.numel():
            pixels = image.on_device
            empty = self.capture(image.read(Box.whole(image.layout.extent)) if pixels is None else pixels)
            bind(fake, empty)
            return empty
        location: Any = "elsewhere" if image.tensor is None else "memory" if image.on_device is None else "here"
        layout, axes = image.layout, len(source.shape) - image.instances - 1
        value = Value(fake, layout, requires_grad)
        op = Source(location, source.reads_ahead, len(layout.extent) - axes, together(source))
        Node(op, (), (value,), "image")
        self.instance_axes.update(range(axes, len(layout.extent)))
        bind(fake, value)
        self.bindings.images[value] = image
        return value

    def captured_tensor(self, value: Value) -> Tensor:
        """Return the tensor that a value was captured from."""
        return self.bindings.captures[value].tensor

    def mark_written(self, value: Value) -> Tensor:
        """Mark a captured tensor as one that the recording itself will write, and return it."""
        tensor = self.captured_tensor(value)
        self.bindings.captures[value] = Capture(tensor, None)
        return tensor

    def copy_before_write(self, tensor: Tensor) -> None:
        """Copy a captured tensor before the user's code writes it, for the recorded calls that read it."""
        for value, capture in self.bindings.captures.items():
            if capture.tensor is tensor and not value.requires_grad and capture.version == version(tensor):
                copy = tensor.clone()
                self.bindings.captures[value] = Capture(copy, version(copy))

    def has_pending_writes(self, values: Iterable[Value]) -> bool:
        """True if an effect will write one of these captured tensors; dormant effects do not count."""
        if not self.effects:
            return False
        tensors = [self.captured_tensor(v) for v in values if v in self.bindings.captures]
        return any(w is t for e in self.effects if not e.dormant for w in e.writes for t in tensors)

    def next_random_call(self) -> int:
        """Return the number of a call of a random operator."""
        self.random_calls += 1
        if logs.now is not None:
            logs.now.random_calls += 1
        return self.random_calls

    def key(self, device: torch.device) -> Tensor:
        """Return the step's key on a device, drawn once from PyTorch's generator."""
        if device not in self.keys:
            cpu = torch.device("cpu")
            self.keys.setdefault(cpu, torch.randint(2**62, (), device=cpu))
            self.keys[device] = self.keys[cpu].to(device)
        return self.keys[device]

    def begin_random_numbers(self) -> None:
        """Forget the key and the number of random calls, for the next step of an image that the user keeps."""
        self.keys.clear()
        self.random_calls = 0

    def draw(self, draw: Callable[[Session], Tensor]) -> Value:
        """Capture a tensor that a call draws: it is drawn again where the call is repeated."""
        value = self.capture(draw(self))
        if logs.now is not None:
            logs.now.draws.append((value, draw))
        return value

    def random_key(self, device: torch.device) -> Value:
        """Return the value of the step's key on a device."""
        return self.draw(lambda session: session.key(device))

    def split_key(self) -> int:
        """Return a number for the cuts of a Split-CNN in this run."""
        return int(self.key(torch.device("cpu"))) + self.next_random_call()


def bind(fake: Tensor, value: Value | Stale) -> None:
    fake.sft_value = value  # type: ignore[attr-defined]
    if logs.now is not None:
        logs.now.binds.append((fake, value))


def binding_of(fake: Tensor) -> Value | Stale | None:
    return getattr(fake, "sft_value", None)


# Module calls

#: The code of `nn.Module.__call__`. Compared by identity: code made by torch.compile cannot be hashed.
_CALL = nn.Module._call_impl.__code__
_names = threading.local()


def current_module() -> tuple[nn.Module | None, str]:
    """Return the innermost module on the call stack and its path from the outermost one; without modules None and an
    empty path."""
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


def innermost_module() -> nn.Module | None:
    """Return the innermost module on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def drop_module_names() -> None:
    """Drop the cached paths of modules, which would keep the modules alive."""
    _names.cache = None


def call_label(func: Callable[..., Any]) -> str:
    """Return the name of a call for messages: the function, and the module that calls it."""
    _, path = current_module()
    return f"{function_name(func)} in '{path}'" if path else function_name(func)


def function_name(func: Callable[..., Any]) -> str:
    """Return the user's name of a function; of a custom autograd function, its class."""
    return getattr(custom_function(func) or func, "__name__", str(func))
