"""Recording: what happens when the user's code calls an operator on a lazy tensor.

The call runs once on fake tensors, which know shapes, dtypes, devices and autocast and hold no data. That run is
watched one level below autograd, where the many spellings of an operator (``x + y``, ``torch.add``, ``x.add_``) have
become one. Then

1. a rule for the function itself (`api`) gets the call, where the function is worth more whole than in pieces: a
   normalisation, a dropout, a padding;
2. else every operator that was seen gets its rule, which turns it into a node;
3. else, if one has no rule, the function as the user called it becomes a barrier.

A call on vectors alone needs no rule. An in-place operator makes a new value and binds the tensor it wrote to to that
value; other tensors that share its memory become *stale*, and using one is an error instead of a wrong number.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Effect, Node, Value, ancestors
from lightning_plugin.layout import Layout
from lightning_plugin.rules.base import Autocast, Barrier, Call, Captured, Gather, Op, Slot, Source, Spread, VectorOp
from lightning_plugin.rules.table import API, ATEN
from lightning_plugin.source import TileSource

#: Shapes are propagated under this mode, which holds no state of a recording.
FAKE = FakeTensorMode(allow_non_fake_inputs=False)


@dataclass(frozen=True)
class Stale:
    """What a tensor is bound to after another tensor that shares its memory was written to."""

    writer: str


@dataclass(eq=False)
class Session:
    """All that is recorded between two executions, however many images it starts from.

    ``settings`` is what the strategy or `TiledModule` said about budget and grids; the executor hands it on.
    """

    settings: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    captured: dict[int, Value] = field(default_factory=dict)
    storages: dict[int, list[Tensor]] = field(default_factory=dict)
    extents: set[tuple[int, ...]] = field(default_factory=set)
    effects: list[Effect] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    tensors: list[weakref.ref[Any]] = field(default_factory=list)
    random_calls: int = 0
    key: int | None = None
    merged: Session | None = None

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

    def root(self) -> Session:
        session = self
        while session.merged is not None:
            session = session.merged
        return session

    def absorb(self, other: Session) -> None:
        """Go on as one recording after values of two met in one call."""
        if other is self:
            return
        self.captured.update(other.captured)
        for storage, fakes in other.storages.items():
            self.storages.setdefault(storage, []).extend(fakes)
        self.extents |= other.extents
        self.effects += other.effects
        self.pending += other.pending
        self.nodes += other.nodes
        self.tensors += other.tensors
        other.nodes = []
        self.settings = self.settings or other.settings
        other.merged = self

    def capture(self, tensor: Tensor) -> Value:
        """The value of a real tensor; the same tensor is the same value."""
        version = 0 if tensor.is_inference() else tensor._version
        known = self.captured.get(id(tensor))
        if known is not None and known.node is not None and known.node.op.version in (version, -1):  # type: ignore[attr-defined]
            return known
        # A parameter on the meta device has no data: such a network is only planned, as if it were on the image's.
        device = self.device if tensor.is_meta else tensor.device
        with FAKE:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        value = Value(fake, None, tensor.requires_grad)
        value.node = Node(Captured(tensor, version), (), (value,), "tensor")
        bind(fake, value)
        self.captured[id(tensor)] = value
        self.nodes.append(value.node)
        return value

    def settle(self, values: Iterable[Value]) -> None:
        """Run what is recorded, if one of these captured tensors is still to be written by it."""
        tensors = [v.node.op.tensor for v in values if v.node is not None and isinstance(v.node.op, Captured)]
        if any(e.writes is t for e in self.effects for t in tensors):
            from lightning_plugin.execute.run import execute

            execute(self, None, [])

    def random_key(self) -> tuple[int, int]:
        """(the step's key, the number of this call): drawn once from torch's generator, so a seed repeats a run."""
        if self.key is None:
            self.key = int(torch.randint(2**62, (1,)).item())
        self.random_calls += 1
        return self.key, self.random_calls


@lru_cache(maxsize=4096)
def unbound(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fake tensor that stands for no particular value; a ledger does not see it."""
    with _disable_current_modes(), FAKE:
        return torch.empty(shape, dtype=dtype, device=device)


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


def source_value(image: TileSource, device: torch.device, requires_grad: bool = False) -> Value:
    """The map of an image."""
    with FAKE:
        fake = torch.empty(image.shape, dtype=image.dtype, device=device)
    value = Value(fake, Layout.channels_first(image.shape), requires_grad)
    value.node = Node(Source(image, device), (), (value,), "image")
    bind(fake, value)
    return value


class Recorder:
    """One call being recorded: what its rules use to make values and nodes."""

    def __init__(self, session: Session, func: Callable[..., Any], autocast: Autocast):
        self.session = session
        self.func = func
        self.name = getattr(func, "__name__", str(func))
        self.autocast = autocast
        self.grad = torch.is_grad_enabled()
        self.path = module_path()

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with FAKE:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def emit(
        self,
        op: Op,
        inputs: Sequence[Value],
        fakes: Sequence[Tensor],
        layouts: Sequence[Layout | None] | Layout | None,
        name: str = "",
        grad: bool = True,
    ) -> tuple[Value, ...]:
        """Add a node; an output requires grad as PyTorch's would."""
        if layouts is None or isinstance(layouts, Layout):
            layouts = [layouts] * len(fakes)
        needs = grad and self.grad and any(v.requires_grad for v in inputs)
        outputs = tuple(
            Value(f, layout, needs and (f.is_floating_point() or f.is_complex()))
            for f, layout in zip(fakes, layouts, strict=True)
        )
        for v in outputs:
            if v.layout is not None and v.layout.shape != v.shape:
                raise AssertionError(f"rule for {name or self.name}: layout says {v.layout.shape}, tensor is {v.shape}")
        node = Node(op, tuple(inputs), outputs, name or self.name, self.path)
        for v in outputs:
            v.node = node
        self.session.extents.update(v.layout.extent for v in outputs if v.layout is not None)
        self.session.nodes.append(node)
        return outputs

    def template(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Value, ...], tuple[Any, ...], tuple]:
        """The values in a call's arguments (maps first) and the arguments with slots in their place."""
        flat, _ = tree_flatten((args, kwargs), is_leaf=lambda a: isinstance(a, Value))
        values = list(dict.fromkeys(a for a in flat if isinstance(a, Value)))
        values.sort(key=lambda v: not v.is_map)
        place = {id(v): Slot(i) for i, v in enumerate(values)}

        def slot(a: Any) -> Any:
            return place[id(a)] if isinstance(a, Value) else a

        is_value = lambda a: isinstance(a, Value)  # noqa: E731
        new_args = tree_map(slot, tuple(args), is_leaf=is_value)
        new_kwargs = tuple((k, tree_map(slot, v, is_leaf=is_value)) for k, v in kwargs.items())
        return tuple(values), new_args, new_kwargs

    def vector(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], fakes: Sequence[Tensor], **how: Any
    ) -> tuple[Value, ...]:
        """A node that runs a function on vectors with ordinary autograd."""
        values, new_args, new_kwargs = self.template(args, kwargs)
        call = Call(func, new_args, new_kwargs, how.pop("autocast", None))
        return self.emit(VectorOp(call, how.pop("rebind", False)), values, fakes, None, **how)

    def spread(self, vector: Value, layout: Layout) -> Value:
        """A vector with spatial dimensions as a map."""
        return self.emit(Spread(layout), [vector], [vector.fake], layout, "slice")[0]

    def gather(self, value: Value) -> Value:
        """A map as one tensor."""
        return self.emit(Gather(), [value], [value.fake], None, "gather")[0] if value.is_map else value

    def barrier(
        self, func: Callable[..., Any], args: Any, kwargs: Any, fakes: Sequence[Tensor], reason: str, rebind: bool
    ) -> tuple[Value, ...]:
        """Run the function whole; outputs shaped like one of its maps are maps again."""
        is_value = lambda a: isinstance(a, Value)  # noqa: E731
        flat, _ = tree_flatten((args, kwargs), is_leaf=is_value)
        layouts = [v.space for v in flat if isinstance(v, Value) and v.is_map]
        args, kwargs = tree_map(lambda a: self.gather(a) if is_value(a) else a, (args, kwargs), is_leaf=is_value)
        values, new_args, new_kwargs = self.template(args, kwargs)
        call = Call(func, new_args, new_kwargs, self.autocast)
        outputs = self.emit(Barrier(call, reason, rebind), values, fakes, None)
        return tuple(self.restore(v, layouts) for v in outputs)

    def restore(self, value: Value, layouts: Sequence[Layout]) -> Value:
        for layout in layouts:
            dims = layout.dims
            if len(dims) == len(value.shape) and all(value.shape[d] == layout.shape[d] > 1 for d in layout.space):
                new = Layout(
                    tuple(dim if layout.is_space(d) else (value.shape[d],) for d, dim in enumerate(dims)), layout.extent
                )
                return self.spread(value, new)
        return value


class Watch(TorchDispatchMode):
    """Notes the operators a function runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out, []))
        return out


def watch(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Watch]:
    with torch.inference_mode(False), torch.no_grad(), FAKE, Watch() as seen:
        out = func(*args, **kwargs)
    return out, seen


def record(session: Session, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call whose tensors are fakes bound to values; returns its result with fakes bound to values."""
    flat, _ = tree_flatten((args, kwargs))
    fakes = [a for a in flat if isinstance(a, Tensor)]
    device = fakes[0].device
    recorder = Recorder(session, func, Autocast.now(device))
    before = {id(f): bound(f) for f in fakes}
    for f in fakes:
        remember_storage(session, f)
    out, seen = watch(API.stand_ins.get(func, func), args, kwargs)
    results = [o for o in tree_flatten(out)[0] if isinstance(o, Tensor)]
    to_value = lambda a: before.get(id(a), a) if isinstance(a, Tensor) else a  # noqa: E731
    vargs, vkwargs = tree_map(to_value, (args, kwargs))

    written = mutated(seen, before)
    spatial = any(isinstance(v, Value) and v.is_map for v in before.values())
    values = None
    enlarging = any(enlarger(session, call, cargs, cout) for call, cargs, _, cout, _ in seen.calls)
    if not spatial and not written and not enlarging:
        values = recorder.vector(func, vargs, vkwargs, results, autocast=recorder.autocast)
        if effect := API.effects.get(func):
            effect(recorder, vargs, vkwargs, values)
    elif spatial and (rule := API.get(func)):
        values = answer(rule(recorder, func, vargs, vkwargs, results))
    if values is None:
        reason = lower(recorder, seen)
        if reason is None:
            return out
        for f in fakes:
            bind(f, before[id(f)])  # type: ignore[arg-type]
        target = [f for f in fakes if id(f) in written]
        if len(target) > 1 or (target and target[0] is not fakes[0]):
            raise RecordingError(
                f"{recorder.name} writes into several tensors, one of them lazy: it cannot be recorded"
            )
        if target:
            results = [target[0]]
        values = recorder.barrier(func, vargs, vkwargs, results, reason, bool(target))
        if target:
            rebind(session, target[0], values[0], recorder.name)
            return out
    for fake, value in zip(results, values, strict=True):
        if id(fake) in before:
            rebind(session, fake, value, recorder.name)
        else:
            bind(fake, value)
            remember_storage(session, fake)
    return out


def enlarger(session: Session, func: Any, args: Any, out: Any) -> Callable[..., Any] | None:
    """The rule for an operator on a vector whose result is as large as a map that was recorded: it is a map too."""
    rule = ATEN.enlargers.get(func)
    if rule is None or not isinstance(out, Tensor) or out.dim() < 3:
        return None
    size = tuple(out.shape[2:])
    return rule if size in session.extents and size != tuple(args[0].shape[2:]) else None


def answer(result: Any) -> tuple[Value, ...] | None:
    """A rule's answer as a tuple, or None where it declined."""
    if result is NotImplemented:
        return None
    return (result,) if isinstance(result, Value) else tuple(result)


def mutated(seen: Watch, before: dict[int, Any]) -> set[int]:
    """Which argument tensors the call wrote to."""
    ids: set[int] = set()
    for func, args, kwargs, _, _ in seen.calls:
        ids.update(id(t) for t in written_by(func, args, kwargs) if id(t) in before)
    return ids


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            t = args[i] if i < len(args) else kwargs.get(a.name)
            if isinstance(t, Tensor):
                yield t


def remember_storage(session: Session, fake: Tensor) -> None:
    known = session.storages.setdefault(fake.untyped_storage()._cdata, [])
    if not any(f is fake for f in known):
        known.append(fake)


def rebind(session: Session, fake: Tensor, value: Value, writer: str) -> None:
    """Bind a written tensor to its new value; whatever else shares its memory is stale from now on."""
    for other in session.storages.get(fake.untyped_storage()._cdata, ()):
        if other is not fake:
            bind(other, Stale(writer))
    bind(fake, value)


def lower(recorder: Recorder, seen: Watch) -> str | None:
    """Turn every operator that was seen into nodes; returns the reason where that is not possible."""
    for func, args, kwargs, out, _ in seen.calls:
        outs = [o for o in tree_flatten(out)[0] if isinstance(o, Tensor)]
        if not outs:
            continue
        failed = lower_one(recorder, func, args, kwargs, outs)
        if failed:
            return failed
    return None


def lower_one(recorder: Recorder, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> str | None:
    written = list(written_by(func, args, kwargs))
    if len(written) > 1 or (written and "out" in kwargs):
        return f"{func} writes into more than its first argument"
    call = functional(func) if written else func
    if call is None:
        return f"{func} has no form that does not write in place"
    flat = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
    for f in flat:
        if isinstance(bound(f), Stale):
            raise stale(bound(f), recorder.name)  # type: ignore[arg-type]
    vargs, vkwargs = tree_map(lambda a: bound(a) if isinstance(a, Tensor) else a, (args, kwargs))
    name = call._schema.name.removeprefix("aten::")
    if any(isinstance(bound(f), Value) and bound(f).is_map for f in flat):  # type: ignore[union-attr]
        rule = ATEN.get(call)
        values = answer(rule(recorder, call, vargs, vkwargs, outs)) if rule else None
        if values is None:
            return f"{name} has no tiling rule for these arguments" if rule else f"{name} has no tiling rule"
    else:
        grow = enlarger(recorder.session, call, args, outs[0])
        values = answer(grow(recorder, call, vargs, vkwargs, outs)) if grow else None
    if values is None:
        # Real vectors need not have the strides of their fakes, and a view is particular about strides.
        again = torch.ops.aten.reshape.default if name in ("view", "_unsafe_view") else call
        values = recorder.vector(again, vargs, vkwargs, outs, name=name)
    if written and isinstance(values[0].node, Node) and func in IN_PLACE:
        values[0].node.inplace = func
    for fake, value in zip(outs, values, strict=True):
        remember_storage(recorder.session, fake)
        if written and fake is written[0]:
            rebind(recorder.session, fake, value, name)
        else:
            bind(fake, value)
    return None


#: In-place operators that overwrite a map with something of the same shape and type, whose backward needs the result
#: or nothing. They save memory where the user's code uses them, so they are run as the user wrote them.
IN_PLACE = {
    getattr(torch.ops.aten, name).default
    for name in (
        "relu_ leaky_relu_ elu_ celu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_ sigmoid_ tanh_ threshold_ relu6_"
    ).split()
    if hasattr(getattr(torch.ops.aten, name, None), "default")
} | {torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor, torch.ops.aten.sub_.Tensor, torch.ops.aten.div_.Tensor}


def functional(func: Any) -> Any:
    """The operator that computes what an in-place operator writes."""
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    if func._schema.name == "aten::copy_":
        return torch.ops.aten.copy.default
    overload = func._schema.overload_name or "default"
    return getattr(packet, overload, None) if packet is not None else None


def stale(state: Stale, user: str) -> RecordingError:
    return RecordingError(
        f"{user} uses a tensor that shares memory with one that {state.writer} has written to in place. Tiles are "
        "computed apart from each other, so a write through one tensor is not seen through another. Use the "
        f"out-of-place form of {state.writer}, or clone before it."
    )


def label(func: Callable[..., Any]) -> str:
    """A call as messages name it: the function, and the module that calls it."""
    name, path = getattr(func, "__name__", str(func)), module_path()
    return f"{name} in '{path}'" if path else name


# Module paths --------------------------------------------------------------------------------------------------------

_CALLS = {nn.Module._call_impl.__code__}
_names = threading.local()


def module_path() -> str:
    """The path, from the outermost module that is being called, of the innermost one; read off the Python stack."""
    frame = sys._getframe(1)
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code in _CALLS:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return ""
    if len(modules) > 1 and getattr(modules[-1], "wraps_only", False):
        modules.pop()  # the user's paths begin at the user's module
    root = modules[-1]
    cached = getattr(_names, "cache", None)
    if cached is None or cached[0] is not root:
        cached = (root, {id(m): n for n, m in root.named_modules()})
        _names.cache = cached
    for module in modules:
        if id(module) in cached[1]:
            return cached[1][id(module)]
    return type(modules[0]).__name__


@contextmanager
def forget_modules() -> Iterator[None]:
    """Drop the cached names after a recording, so that no module is kept alive by them."""
    try:
        yield
    finally:
        _names.cache = None
