"""Tensors without storage: `LazyTensor`, and `LazyImage`, the one a user makes.

A lazy tensor answers what can be answered without data (shape, dtype, device, requires_grad), records every operator
that is called on it, and is *executed* (`materialize`) when a value is needed: ``item``, ``bool``, printing,
``backward``, a write into a real tensor. What it answers which call with is in `answers`. A vector that was executed is
an ordinary tensor from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_plugin.capture.alias import current, remember_storage
from lightning_plugin.capture.record import Recorder
from lightning_plugin.capture.run import run
from lightning_plugin.capture.session import Session, bound
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.ops import Autocast
from lightning_plugin.private import collate_by, compiles, tree_leaves, tree_map, without_storage
from lightning_plugin.source import TensorSource, TileSource, batch, likely_instances


class LazyTensor(Tensor):
    """A recorded result. Not made by users; see `LazyImage`."""

    _fake: Tensor
    _session: Session
    #: Answers a call. Answers take and make lazy tensors, so they stand above them, and `answers` sets this.
    _answer: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def _wrap(cls: type, fake: Tensor, session: Session, requires_grad: bool) -> Any:
        grad = requires_grad and (fake.is_floating_point() or fake.is_complex())
        self = without_storage(cls, fake, grad)
        self._fake = fake
        self._session = session
        session.tensors.append(weakref.ref(self))
        return self

    @property
    def _value(self) -> Value:
        """Its value as it is now, after all that was written to it through other tensors."""
        return self._read_by(None)

    def _read_by(self, func: Callable[..., Any] | None) -> Value:
        """Its value, for a function that reads it, if one does."""
        state = bound(self._fake)
        if isinstance(state, Value):
            return state
        return current(self._fake, Recorder(self._session.root(), func, Autocast.now(self._fake.device)))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return cls._answer(func, args, kwargs or {})

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
    """An image of any size, as a tensor ``(N, C, *spatial)`` that holds no pixels.

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
        shape = tuple(source.shape)
        if len(shape) < 3:
            raise ValueError(f"an image is (N, C, *spatial) with at least one spatial axis, got shape {shape}")
        target = torch.device(device) if device is not None else torch.device("cpu")
        session = Session(engine, target)
        with session.faking():
            fake = torch.empty(shape, dtype=source.dtype, device=target)
        self = LazyTensor._wrap(cls, fake, session, requires_grad)
        self._source = source
        session.image(source, fake, requires_grad)
        remember_storage(session, fake)
        return self

    def _read_by(self, func: Callable[..., Any] | None) -> Value:
        """The image as it is now: if its source has changed since it was last looked at, it is another value."""
        value = super()._read_by(func)
        session = self._session.root()
        image = session.bindings.images.get(value)
        if image is not None and image.changed:
            return session.image(self._source, self._fake, value.requires_grad)
        return value

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, device: torch.device | str | None = None, engine: Any = None) -> LazyImage:
        """An image that is in memory already; it stays where it is and is moved tile by tile.

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


def lazies(tree: Any) -> list[LazyTensor]:
    return [a for a in tree_leaves(tree) if isinstance(a, LazyTensor)]


def session_of(tensors: Iterable[LazyTensor]) -> Session:
    """The one recording that tensors belong to; recordings that meet become one."""
    sessions = [t._session.root() for t in tensors]
    first = sessions[0]
    for other in sessions[1:]:
        first.absorb(other.root())
    return first


def materialize(tensor: Tensor) -> Tensor:
    """The ordinary tensor of a lazy one: computes it, and whatever small is waiting beside it, under one plan.

    A map is gathered whole on its device; do this only with maps that fit.
    """
    return materialized([tensor])[0] if isinstance(tensor, LazyTensor) else tensor


def materialized(tensors: Sequence[LazyTensor], beside: Iterable[LazyTensor] = ()) -> list[Tensor]:
    """The ordinary tensors of several lazy ones, of each recording under one plan.

    Args:
        tensors: The lazy tensors.
        beside: Others whose recordings run too, for what they do besides returning results.
    """
    found = [known(t) for t in tensors]
    for session in dict.fromkeys(t._session.root() for t in (*tensors, *beside)):
        places = [i for i, t in enumerate(found) if isinstance(t, LazyTensor) and t._session.root() is session]
        results = run(session, [found[i]._value for i in places])
        session.forget()
        for i, result in zip(places, results, strict=True):
            found[i] = result
    return found


def materialize_all(result: Any, beside: Iterable[LazyTensor] = ()) -> Any:
    """A result with ordinary tensors for its lazy ones, all of them computed under one plan, also in the attributes of
    objects, which are set anew; ``beside`` are others whose recordings run too."""
    found: dict[int, LazyTensor] = {}
    with_others(result, lambda tensor: found.setdefault(id(tensor), tensor), set())
    tensors = dict(zip(found, materialized(list(found.values()), beside), strict=True))
    return with_others(result, lambda tensor: tensors[id(tensor)], set()) if found else result


def with_others(result: Any, other: Callable[[LazyTensor], Tensor], seen: set[int]) -> Any:
    """A result with other tensors for its lazy ones; ``seen`` are the objects that were looked into."""

    def replaced(a: Any) -> Any:
        if isinstance(a, LazyTensor):
            return other(a)
        if hasattr(a, "__dict__") and not isinstance(a, (Tensor, nn.Module, type, ModuleType)) and id(a) not in seen:
            seen.add(id(a))
            for name, value in list(vars(a).items()):
                new = with_others(value, other, seen)
                if lazies(value):
                    object.__setattr__(a, name, new)
        return a

    return tree_map(replaced, result)


def known(value: Any, func: Callable[..., Any] | None = None) -> Any:
    """A lazy vector that was executed, as the tensor it has become; anything else unchanged."""
    if isinstance(value, LazyTensor):
        real = computed(value, value._read_by(func))
        return value if real is None else real
    return value


def computed(tensor: LazyTensor, value: Value) -> Tensor | None:
    """Result of a small value, if it was computed."""
    return tensor._session.root().vectors.get(value)


@contextmanager
def recording_eagerly() -> Iterator[None]:
    """Modules that `torch.compile` made run uncompiled: tiles are what is executed, not the recording."""
    if not compiles():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
