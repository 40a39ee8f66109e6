"""Tensors without storage: `LazyTensor`, and `LazyImage`, the one a user makes.

A lazy tensor has metadata (shape, dtype, device, requires_grad), records every operator that is called on it, and is
*materialized* when data is needed: by ``item``, ``bool``, printing, ``backward``, or a write into an ordinary tensor.
The handlers of calls are in `dispatch`.

[Note: kept] Code keeps results: a loss in a list, predictions until the end of an epoch. When a run has computed a
vector, the lazy tensor itself becomes an ordinary one, so that what is kept holds neither the recording nor an image.
At the end of a step or of a module's call, its results do too, and small maps with one row for each image that need no
gradient. Any other map that is kept stays recorded, with its image.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_plugin.capture.alias import current_value, has_value, register_storage
from lightning_plugin.capture.record import Recorder
from lightning_plugin.capture.run import discard_effects, run
from lightning_plugin.capture.session import Session, binding_of
from lightning_plugin.capture.shared import holders_of, image_tensor, view_in
from lightning_plugin.errors import EngineError, RecordingError
from lightning_plugin.graph import Value, next_serial, with_requires_grad
from lightning_plugin.layout import copy_like
from lightning_plugin.ops import Autocast, has_gradients
from lightning_plugin.private import (
    collate_by,
    has_compiler,
    override_functions,
    tree_leaves,
    tree_map,
    without_storage,
)
from lightning_plugin.source import TensorSource, TileSource, batch, likely_instances

#: Most bytes of kept rows that are computed at the end of a step.
MAX_KEPT_ROWS_BYTES = 1 << 20


class LazyTensor(Tensor):
    """Recorded result. Users make a `LazyImage`."""

    _fake: Tensor
    _session: Session
    #: Handler of calls, set by `dispatch.install_dispatch`: handlers make lazy tensors, so they import this file.
    _dispatch: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def _wrap(cls: type, fake: Tensor, session: Session, requires_grad: bool) -> Any:
        self = without_storage(cls, fake, requires_grad and has_gradients(fake.dtype))
        self._fake = fake
        self._session = session
        session.lazy_tensors.append(weakref.ref(self))
        return self

    @property
    def _value(self) -> Value:
        """The current value, with all writes through other tensors that share the memory."""
        return self._value_for(None)

    def _value_for(self, func: Callable[..., Any] | None) -> Value:
        """Return the current value for a function that reads it; messages name the function."""
        state = binding_of(self._fake)
        if isinstance(state, Value):
            return state
        return current_value(self._fake, Recorder(self._session.root(), func, Autocast.current(self._fake.device)))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return cls._dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        if func is torch.ops.aten.detach.default:
            return args[0].detach() if not isinstance(args[0], LazyTensor) else args[0]
        raise RecordingError(
            f"{func} reached a lazy tensor below the level at which calls are recorded: from torch.func (vmap, grad, "
            "jvp, …), a custom autograd.Function or a compiled extension. Use the batched form of the operator, run "
            "that part on materialize(x), a map that is held whole, or give it a rule."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RecordingError(
            "a recorded tensor cannot be pickled or copied: it has no data yet. Take its value first (.item(), "
            "materialize(...)), or detach what you want to keep."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()


class LazyImage(LazyTensor):
    """Image of any size, as a tensor ``(N, C, *spatial)`` that holds no pixels.

    ``source`` is a `TileSource`; its tiles are moved to ``device`` as they are read::

        image = LazyImage(source)
        loss = model(image).sum()      # records; nothing is read, nothing is allocated
        loss.backward()                # runs tile by tile
    """

    _source: TileSource

    def __new__(
        cls,
        source: TileSource | Tensor,
        *,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        engine: Any = None,
    ) -> LazyImage:
        if isinstance(source, Tensor):
            return cls.from_tensor(source, device=device, engine=engine)
        if not isinstance(source, TileSource):
            raise TypeError(f"an image is a tensor or a TileSource, not {type(source).__name__}: subclass TileSource")
        collate_by(cls, collate_images)
        override_functions(LazyTensor)
        shape = tuple(source.shape)
        if len(shape) < 3:
            raise ValueError(f"an image is (N, C, *spatial) with at least one spatial axis, got shape {shape}")
        target = torch.device(device) if device is not None else torch.device("cpu")
        session = Session(engine, target)
        strides = strides_of(source)
        with session.fake_tensors():
            fake = torch.empty_strided(shape, strides, dtype=source.dtype, device=target)
        self = LazyTensor._wrap(cls, fake, session, requires_grad)
        self._source = source
        session.bind_image(source, fake, requires_grad)
        register_storage(session, fake)
        return self

    def _value_for(self, func: Callable[..., Any] | None) -> Value:
        """Return the current value: a new one if the source has a new version."""
        value = super()._value_for(func)
        session = self._session.root()
        image = session.bindings.images.get(value)
        if image is not None and image.changed:
            return session.bind_image(self._source, self._fake, value.requires_grad)
        return value

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, device: torch.device | str | None = None, engine: Any = None) -> LazyImage:
        """Make an image of a tensor in memory, which stays there and is moved tile by tile.

        A tensor that requires grad gets its gradient.
        """
        if isinstance(tensor, LazyImage):
            return tensor
        source = TensorSource(tensor, likely_instances(tensor.shape))
        return cls(source, device=device or tensor.device, requires_grad=tensor.requires_grad, engine=engine)

    @property
    def source(self) -> TileSource:
        return self._source

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_image, (type(self), self._source, str(self.device), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> LazyImage:
        return self


def _rebuild_image(cls: type[LazyImage], source: TileSource, device: str, requires_grad: bool) -> LazyImage:
    return cls(source, device=device, requires_grad=requires_grad)


def collate_images(images: list[LazyImage], *, collate_fn_map: Any = None) -> LazyImage:
    """Collate images for `torch.utils.data.default_collate`: to a batch of them, still unread."""
    first = images[0]
    # Images out of a dataset carry no batch dimension of their own beyond the leading one of their source.
    source = batch([image.source for image in images])
    grad = any(image.requires_grad for image in images)
    return LazyImage(source, device=first.device, requires_grad=grad, engine=first._session.root().engine)


def strides_of(source: TileSource) -> tuple[int, ...]:
    """Return the strides of an image's pixels in one tensor."""
    like = source.tensor if isinstance(source, TensorSource) else torch.empty(tuple(source.shape), device="meta")
    return torch.empty_like(like, device="meta").stride()


def lazy_tensors(tree: Any) -> list[LazyTensor]:
    return [a for a in tree_leaves(tree) if isinstance(a, LazyTensor)]


def merge_sessions(tensors: Iterable[LazyTensor]) -> Session:
    """Return the session of some tensors; several sessions are merged."""
    sessions = [t._session.root() for t in tensors]
    first = sessions[0]
    for other in sessions[1:]:
        first.merge(other.root())
    return first


def materialize(tensor: Tensor) -> Tensor:
    """Compute the ordinary tensor of a lazy one, and all pending vectors with it, under one plan.

    A map is gathered whole on its device; do this only with maps that fit.
    """
    return materialize_together([tensor])[0] if isinstance(tensor, LazyTensor) else tensor


def materialize_together(
    tensors: Sequence[LazyTensor], for_effects: Iterable[LazyTensor] = (), in_place: bool = False
) -> list[Tensor]:
    """Compute the ordinary tensors of several lazy ones, under one plan for each session.

    Args:
        tensors: The lazy tensors.
        for_effects: Lazy tensors whose sessions run too, for their effects.
        in_place: Make maps ordinary tensors too, except images. Vectors always are.
    """
    found = [computed_or_same(t) for t in tensors]
    for session in dict.fromkeys(t._session.root() for t in (*tensors, *for_effects)):
        places = [i for i, t in enumerate(found) if isinstance(t, LazyTensor) and t._session.root() is session]
        given = [tensors[i] for i in places]
        fakes, requires_grad = [t._fake for t in given], [t.requires_grad for t in given]
        wanted = [t._value for t in given]
        holders = holders_of(session, fakes)
        for k, holder in holders.items():
            wanted[k] = current_value(holder, Recorder(session, None, Autocast.current(holder.device)))
        images = {wanted[k]: image_tensor(session, holder) for k, holder in holders.items()}
        computed = {v: with_requires_grad(t, v.requires_grad) for v, t in images.items() if t is not None}
        values = [v for v in dict.fromkeys(wanted) if v not in computed]
        computed |= zip(values, run(session, values), strict=True)
        for v, holder in {wanted[k]: holder for k, holder in holders.items()}.items():
            if computed[v].stride() != holder.stride():
                computed[v] = copy_like(computed[v], holder)
        results = [computed[v] for v in wanted]
        for k, holder in holders.items():
            results[k] = view_in(results[k], holder, fakes[k], requires_grad[k])
        for i, result in zip(places, results, strict=True):
            if in_place and type(found[i]) is LazyTensor:
                session.replace(found[i], result)
        session.drop_unreachable()
        for k, i in enumerate(places):
            if isinstance(found[i], LazyTensor) or k in holders:  # vectors are ordinary tensors now
                found[i] = results[k]
    return found


def materialize_all(result: Any, for_effects: Sequence[LazyTensor] = ()) -> Any:
    """Replace the lazy tensors in a result, also in attributes of objects, by ordinary ones computed under one plan;
    see [Note: kept].

    Args:
        result: A tree of tensors and objects.
        for_effects: Lazy tensors whose sessions run too, for their effects.
    """
    found: dict[int, LazyTensor] = {}
    replace_lazy(result, lambda tensor: found.setdefault(id(tensor), tensor), set())
    sessions = dict.fromkeys(t._session.root() for t in (*found.values(), *for_effects))
    found |= {id(t): t for session in sessions for t in kept_rows(session)}
    tensors = dict(zip(found, materialize_together(list(found.values()), for_effects, in_place=True), strict=True))
    return replace_lazy(result, lambda tensor: tensors[id(tensor)], set()) if found else result


def kept_rows(session: Session) -> list[LazyTensor]:
    """Return the rows that the user's code keeps and that need no gradient; see [Note: kept]."""
    maps = [t for t in session.alive if type(t) is LazyTensor and has_value(t._fake) and t._value.is_map]
    return [t for t in maps if session.is_row(v := t._value) and not v.requires_grad and v.bytes <= MAX_KEPT_ROWS_BYTES]


def replace_lazy(result: Any, other: Callable[[LazyTensor], Tensor], seen: set[int]) -> Any:
    """Replace the lazy tensors in a tree and in attributes of its objects.

    Args:
        result: The tree.
        other: Returns the replacement of a lazy tensor.
        seen: Identities of the objects that were visited already.
    """

    def replaced(a: Any) -> Any:
        if isinstance(a, LazyTensor):
            return other(a)
        if not isinstance(a, (Tensor, nn.Module, type, ModuleType)) and id(a) not in seen and (held := attributes(a)):
            seen.add(id(a))
            for name, value in held.items():
                new = replace_lazy(value, other, seen)
                if lazy_tensors(value):
                    object.__setattr__(a, name, new)
        return a

    return tree_map(replaced, result)


def attributes(a: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dictionary and in the slots of a dataclass."""
    fields = dataclasses.fields(a) if dataclasses.is_dataclass(a) else ()
    return {f.name: getattr(a, f.name) for f in fields if hasattr(a, f.name)} | getattr(a, "__dict__", {})


def computed_or_same(value: Any, func: Callable[..., Any] | None = None) -> Any:
    """Return the ordinary tensor of a lazy one that is computed; anything else unchanged."""
    if isinstance(value, LazyTensor):
        real = computed_vector(value, value._value_for(func))
        return value if real is None else real
    return value


def computed_vector(tensor: LazyTensor, value: Value) -> Tensor | None:
    """Return the result of a vector; None if it is not computed."""
    return tensor._session.root().vectors.get(value)


def run_users_code(
    call: Callable[[], Any], images: Sequence[LazyTensor], for_effects: Sequence[LazyTensor] = (), compute: bool = True
) -> Any:
    """Record the calls that the user's code makes on images; return its result.

    If a call is refused, the effects of all are dropped: no statistics move then. Modules of `torch.compile` run
    uncompiled while they are recorded: tiles are executed, not the recording.

    Args:
        call: The user's code.
        images: The lazy tensors that it is given.
        for_effects: As in `materialize_all`.
        compute: Compute the lazy tensors in the result.
    """
    begin, sessions = next_serial(), [t._session for t in images]  # a vector may be computed within the code
    try:
        with torch.compiler.set_stance("force_eager") if has_compiler() else nullcontext():
            out = call()
        return materialize_all(out, for_effects) if compute else out
    except EngineError:
        for session in {session.root() for session in sessions}:
            discard_effects(session, begin)
        raise
