"""Comparison of calls with recorded ones: a call that was seen is not recorded again.

The user's code runs in every step, on lazy tensors. What it calls is mostly what it called in an earlier step. A
*transcript* is the sequence of the calls of one step on the lazy tensors of an engine; the transcripts of all steps
form a tree, whose *entries* are calls. An entry has what a call was given and what recording it has done: nodes, values
of tensors, effects. A call that equals one of the entries that follow the last one is *repeated*: it gets the recorded
result, and what recording did to the session is done again. Any other call is recorded, and is an entry from then on.

Two calls are equal if they have the same function, the same lazy tensors with the same values, equal numbers and
flags, the same modes (gradients, autocast, and others in `modes`), and captured tensors of equal metadata that are
one tensor where they were one tensor. An entry holds no tensor with data: the tensors of a step are bound to its
values, as images are. So a module's weights may be others in each step, and a weight that is shared from now on, a
buffer that changes its type, a flag, a rate or a branch in Python is another call.

Calls that are always recorded, as is everything after them in their step: those of functions that are not PyTorch's
(they may depend on anything), with arguments of unknown types, which read the data of a captured tensor while they are
recorded, in blocks of `torch.utils.checkpoint`, and within dispatch modes. What a call draws itself is drawn anew.

Entries are held by an engine, `MAX_ROOTS` first images of steps at most. Their fake tensors serve one step at a time:
a step that begins while another one with the same first image has lazy tensors gets entries of its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin.capture.alias import register_storage
from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.run import AwaitingBuffer, add_effect
from lightning_plugin.capture.session import Log, Session, Stale, bind, binding_of, innermost_module
from lightning_plugin.graph import Effect, Value
from lightning_plugin.ops import Autocast
from lightning_plugin.private import (
    FakeTensor,
    dispatch_mode,
    has_saved_tensor_hooks,
    tree_leaves,
    tree_map,
)
from lightning_plugin.rules.table import API, ATEN

#: Most first images, with all that was recorded after them, that an engine keeps.
MAX_ROOTS = 16
#: Most entries after a first image: code that calls something new in each step is not remembered.
MAX_ENTRIES = 8192

#: Most runs, and most maps taken whole, that are remembered after one call.
MAX_RUNS = 64
#: Most different calls after one call.
MAX_FOLLOWING = 8

#: Types of arguments that are compared by value.
CONSTANTS = (
    bool, int, float, complex, str, type(None), EllipsisType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


class NotComparable(Exception):
    """A call has an argument that cannot be compared."""


class Given(NamedTuple):
    """Tensor among the arguments of a recorded call.

    Attributes:
        fake: Its fake tensor.
        state: What the fake tensor was bound to.
        facts: Of a tensor with data, shape, strides, type and ``requires_grad``; None of a recorded one.
    """

    fake: Tensor
    state: Value | Stale
    facts: tuple[Any, ...] | None


class Argument(NamedTuple):
    """Result that is one of the arguments, by its place among them."""

    place: int


@dataclass(eq=False)
class Seen:
    """A recorded call, or the first use of an image.

    Attributes:
        following: The entries of the calls that came after it in some step.
        recordings: The nodes of runs that began after it, each with what is derived from them.
        gathers: Values of maps as one tensor that were asked for after it.
    """

    following: list[Seen] = field(default_factory=list, init=False)
    recordings: dict[Any, Any] = field(default_factory=dict, init=False)
    gathers: dict[Value, Value] = field(default_factory=dict, init=False)

    def keep(self, known: dict[Any, Any], key: Any, found: Any) -> None:
        """Keep what a run found, `MAX_RUNS` at most: values that were recorded outside of entries are new in each
        step."""
        if len(known) == MAX_RUNS:
            del known[next(iter(known))]
        known[key] = found


@dataclass(eq=False)
class SeenImage(Seen):
    """First use of an image.

    Attributes:
        facts: What recording depends on; see `image_facts`.
        fake: The fake tensor.
        value: The value.
        size: Number of entries that follow, if this is the first image of a step.
        user: The transcript that uses the entries after it.
    """

    facts: tuple[Any, ...]
    fake: Tensor
    value: Value
    size: int = 0
    user: weakref.ref[Transcript] | None = None


@dataclass(eq=False)
class SeenCall(Seen):
    """A recorded call.

    Attributes:
        func: The function.
        modes: The modes, for the type of the device of its first tensor.
        args: The arguments: trees of `Given` tensors and constants.
        kwargs: The named arguments.
        out: The result: a tree of fake tensors, arguments and constants.
        log: What recording it did.
    """

    func: Callable[..., Any]
    device_type: str
    modes: tuple[Any, ...]
    args: Any
    kwargs: Any
    out: Any
    log: Log


@dataclass(eq=False)
class Transcript:
    """The calls of one step.

    Attributes:
        root: The first entry of the step.
        place: The last entry of the step so far; None if the rest is recorded without entries.
        sessions: The sessions whose calls it has.
    """

    root: SeenImage
    place: Seen | None
    sessions: list[weakref.ref[Session]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """True if no lazy tensor of the step is left."""
        return all(session() is None for session in self.sessions)

    def append(self, entry: Seen) -> None:
        """Add an entry after the last one."""
        if self.place is None:
            return
        self.place.following.append(entry)
        del self.place.following[:-MAX_FOLLOWING]
        self.place = entry
        self.root.size += 1
        if self.root.size > MAX_ENTRIES:
            self.close()

    def close(self) -> None:
        """Forget what was recorded after the first entry, and record the rest of the step without entries."""
        self.root.following.clear()
        self.root.size, self.place = 0, None

    def rewind(self, session: Session) -> None:
        """Begin again, if nothing is left of a session's calls but the image, which the user keeps for a next step."""
        others = [other for ref in self.sessions if (other := ref()) is not None and other is not session]
        alive = session.alive
        if others or len(alive) != 1 or session.effects or not isinstance(alive[0], LazyImage):
            return
        if alive[0]._fake is self.root.fake and binding_of(self.root.fake) is self.root.value:
            self.place = self.root
            session.begin_random_numbers()


class Transcripts:
    """The transcripts of an engine.

    Attributes:
        roots: The first entries of steps, the last used one last.
        now: The transcript of the step that is being recorded.
        rules: Number of rules when the entries were recorded.
    """

    def __init__(self) -> None:
        self.roots: list[SeenImage] = []
        self.now: Transcript | None = None
        self.rules: tuple[int, int] = (0, 0)

    def join(self, session: Session) -> None:
        """Have the calls of a session compared from now on, if it has none yet."""
        lazy = session.alive
        if len(lazy) != 1 or not isinstance(lazy[0], LazyImage) or session.captured_values or session.vectors:
            return
        image, value = lazy[0], binding_of(lazy[0]._fake)
        if not isinstance(value, Value) or list(session.bindings.images) != [value]:
            return
        if self.rules != (API.changes, ATEN.changes):
            self.rules = API.changes, ATEN.changes
            self.roots.clear()
            self.now = None
        facts = image_facts(image, value)
        now = self.now
        if now is None or now.is_over or now.root.fake.fake_mode is not session.fake_mode:  # type: ignore[attr-defined]
            root = self.root(facts, image, value)
            now = self.now = Transcript(root, root)
            root.user = weakref.ref(now)
            entry = root
        elif now.place is None:
            return
        else:
            known = (e for e in now.place.following if isinstance(e, SeenImage) and e.facts == facts)
            entry = next(known, None) or SeenImage(facts, image._fake, value)
            if entry in now.place.following:
                now.place = entry
            else:
                now.append(entry)
        now.sessions.append(weakref.ref(session))
        session.transcript = now
        session.fakes_by_storage.clear()
        session.bindings.images[entry.value] = session.bindings.images.pop(value)
        image._fake = entry.fake
        bind(entry.fake, entry.value)
        register_storage(session, entry.fake)

    def root(self, facts: tuple[Any, ...], image: LazyImage, value: Value) -> SeenImage:
        """Return the first entry of a step on an image, which no other step uses."""
        for root in reversed(self.roots):
            user = None if root.user is None else root.user()
            free = user is None or user.is_over
            if root.facts == facts and free and root.fake.fake_mode is image._fake.fake_mode:  # type: ignore[attr-defined]
                self.roots.remove(root)
                break
        else:
            root = SeenImage(facts, image._fake, value)
        self.roots.append(root)
        del self.roots[:-MAX_ROOTS]
        return root


def image_facts(image: LazyImage, value: Value) -> tuple[Any, ...]:
    """Return all of an image that recording depends on."""
    fake, node = image._fake, value.node
    assert node is not None
    return fake.shape, fake.stride(), fake.dtype, fake.device, value.requires_grad, node.op, value.layout


# Comparing


def repeat(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], session: Session) -> Any:
    """Return the result of a call that equals a recorded one; `NotImplemented` if there is none."""
    transcript = session.transcript
    if transcript is None or transcript.place is None:
        return NotImplemented
    now: dict[str, tuple[Any, ...]] = {}
    for entry in transcript.place.following:
        if not isinstance(entry, SeenCall) or entry.func != func:
            continue
        kind = entry.device_type
        if kind not in now:
            now[kind] = modes(func, kind)
        if now[kind] != entry.modes or not equals((entry.args, entry.kwargs), (args, kwargs), session):
            continue
        if session.has_pending_writes(entry.log.settled):
            continue
        drawn = [(value, draw(session)) for value, draw in entry.log.draws]
        if any(session.known_capture(tensor) not in (None, value) for value, tensor in drawn):
            continue  # the step's key has another value
        for value, tensor in drawn:
            session.bind_capture(value, tensor)
        transcript.place = entry
        repeat_log(entry.log, session)
        return result_of(entry.out, args, kwargs, session)
    return NotImplemented


def modes(func: Callable[..., Any], device_type: str) -> tuple[Any, ...]:
    """Return the state of PyTorch that the recording of a call depends on."""
    found: tuple[Any, ...] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        has_saved_tensor_hooks(),
    )
    if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
        cuda = torch.backends.cuda
        found += (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        )  # fmt: skip
    return found


def equals(recorded: Any, given: Any, session: Session) -> bool:
    """True if an argument equals a recorded one."""
    kind = type(recorded)
    if kind is Given:
        if recorded.facts is not None:
            has_data = isinstance(given, Tensor) and not isinstance(given, LazyTensor)
            return has_data and is_bound(recorded, given, session)
        fake, state = recorded.fake, recorded.state
        if not isinstance(given, LazyTensor) or given._fake is not fake or binding_of(fake) is not state:
            return False
        image = session.bindings.images.get(state)  # type: ignore[arg-type]
        return state not in session.vectors and (image is None or not image.changed)
    if type(given) is not kind:
        return False
    if kind is tuple or kind is list or kind is torch.Size:
        if len(given) != len(recorded):
            return False
        # Most constants are attributes of modules, and one object. A generator would take twice as long.
        for a, b in zip(recorded, given, strict=True):  # noqa: SIM110
            if a is not b and not equals(a, b, session):
                return False
        return True
    if kind is dict:
        if not recorded or list(given) != list(recorded):
            return not given and not recorded
        return all(a is given[name] or equals(a, given[name], session) for name, a in recorded.items())
    if kind is slice:
        ends = (recorded.start, recorded.stop, recorded.step), (given.start, given.stop, given.step)
        return equals(*ends, session)
    if kind is float and recorded == 0.0:
        return bool(given == 0.0 and math.copysign(1, given) == math.copysign(1, recorded))
    return bool(given == recorded)


def is_bound(recorded: Given, tensor: Tensor, session: Session) -> bool:
    """True if a tensor with data stands for a recorded one; binds it, if the recorded one is not bound yet."""
    value, captures = recorded.state, session.bindings.captures
    assert isinstance(value, Value)
    known = session.known_capture(tensor)
    if known is not None or value in captures:
        return known is value
    if isinstance(tensor, AwaitingBuffer) and tensor._session.root() is not session:
        return False
    if not is_plain(tensor) or facts_of(tensor) != recorded.facts:
        return False
    if session.device_of(tensor) != value.device:
        return False
    session.bind_capture(value, tensor)
    return True


def facts_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what recording depends on of a tensor with data, besides its device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def repeat_log(log: Log, session: Session) -> None:
    """Do to a session what the recording of a call did."""
    for fake, state in log.binds:
        fake.sft_value = state  # type: ignore[attr-defined]
    for key, fake in log.stored:
        session.add_stored(key, fake)
    session.extents |= log.extents
    if log.axes:
        session.instance_axes |= log.axes
    session.add_nodes(log.serials)
    session.random_calls += log.random_calls
    for effect, buffers in log.effects:
        writes = tuple(map(session.captured_tensor, buffers))
        norm = None if effect.norm is None else innermost_module()
        add_effect(session, Effect(effect.values, effect.run, writes, norm=norm), buffers)  # type: ignore[arg-type]


def result_of(out: Any, args: Any, kwargs: Any, session: Session) -> Any:
    """Return lazy tensors for the fake tensors of a recorded result."""

    def lazy(o: Any) -> Any:
        if type(o) is Argument:
            return tree_leaves((args, kwargs))[o.place]
        if not isinstance(o, Tensor):
            return o
        value = binding_of(o)
        assert isinstance(value, Value)
        return LazyTensor._wrap(LazyTensor, o, session, value.requires_grad)

    return lazy(out) if type(out) is FakeTensor or type(out) is Argument else tree_map(lazy, out)


# Recording


def begin_log(func: Callable[..., Any], session: Session) -> Log | None:
    """Return the log for a call that is to be recorded and compared in later steps; None if it is not comparable."""
    transcript = session.transcript
    if transcript is None or transcript.place is None:
        return None
    if not is_pytorch(func) or has_saved_tensor_hooks() or dispatch_mode() is not None:
        transcript.place = None
        return None
    return Log(frozenset(session.instance_axes))


def given_arguments(args: Any, kwargs: Any, owners: Mapping[int, Tensor]) -> Any:
    """Return the arguments of a call, with a `Given` for each fake tensor; None if they cannot be compared.

    Args:
        args: The arguments, with fake tensors.
        kwargs: The named arguments.
        owners: The user's tensors, by the identities of the fake ones.
    """
    try:
        return given((tuple(args), kwargs), owners)
    except NotComparable:
        return None


def given(a: Any, owners: Mapping[int, Tensor]) -> Any:
    """Return an argument as `given_arguments` does; a function of its own, since a closure that calls itself would keep
    the user's tensors alive."""
    kind = type(a)
    if isinstance(a, Tensor):
        state, owner = binding_of(a), owners[id(a)]
        is_captured = not isinstance(owner, LazyTensor)
        if state is None or (is_captured and not is_plain(owner)):
            raise NotComparable
        requires_grad = isinstance(state, Value) and state.requires_grad
        return Given(a, state, (a.shape, a.stride(), a.dtype, requires_grad) if is_captured else None)
    if kind is tuple or kind is list:
        parts = kind([given(part, owners) for part in a])
        same = kind is tuple and all(part is before for part, before in zip(parts, a, strict=True))
        return a if same else parts
    if kind is dict:
        return {name: given(part, owners) for name, part in a.items()}
    if kind is slice:
        given((a.start, a.stop, a.step), owners)
    elif (kind is not torch.Size and kind not in CONSTANTS) or a != a:  # not a number
        raise NotComparable
    return a


def is_plain(tensor: Tensor) -> bool:
    """True for a tensor with data that is told from others by its metadata alone."""
    kind = type(tensor)
    known = kind is Tensor or kind is nn.Parameter or kind is AwaitingBuffer
    return known and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def add_call(func: Callable[..., Any], arguments: Any, out: Any, log: Log, session: Session) -> None:
    """Add a call that was recorded to those that later ones are compared with.

    Args:
        func: The function.
        arguments: The arguments and named arguments, by `given_arguments`.
        out: The result, of fake tensors.
        log: What recording did.
        session: The session.
    """
    transcript = session.transcript
    assert isinstance(transcript, Transcript)
    leaves = leaves_of(arguments)
    tensors = [a for a in leaves if type(a) is Given]
    known = {a.state for a in tensors}.union(value for value, _ in log.draws)
    if not tensors or not log.is_repeatable or not log.captured <= known:
        transcript.place = None
        return
    log.axes = frozenset(session.instance_axes - log.axes)
    places = {id(a.fake): i for i, a in enumerate(leaves) if type(a) is Given}
    out = tree_map(lambda o: Argument(places[id(o)]) if id(o) in places else o, out)
    kind = Autocast.current(tensors[0].fake.device).device_type
    args, kwargs = arguments
    transcript.append(SeenCall(func, kind, modes(func, kind), args, kwargs, out, log))


def leaves_of(arguments: Any) -> list[Any]:
    """Return the leaves of arguments of `given_arguments`, in order."""
    if type(arguments) is tuple or type(arguments) is list:
        return [a for part in arguments for a in leaves_of(part)]
    if type(arguments) is dict:
        return [a for part in arguments.values() for a in leaves_of(part)]
    return [arguments]


def is_pytorch(func: Callable[..., Any]) -> bool:
    """True for a function of PyTorch's own, whose calls depend on their arguments and on modes alone."""
    if isinstance(func, FunctionType):
        return func.__module__.startswith("torch.")
    owner = getattr(func, "__self__", None)
    return not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function))
