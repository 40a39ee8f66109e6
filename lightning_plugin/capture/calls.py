"""Calls of functions on lazy tensors: recorded (see `record`), or run where all they need is known."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_plugin.capture.indices import fitting, without_masks
from lightning_plugin.capture.lazy import LazyTensor, known, lazies, materialize, session_of
from lightning_plugin.capture.record import WritesImage, lies_in, record
from lightning_plugin.capture.run import settle_buffers
from lightning_plugin.capture.session import Session, bound
from lightning_plugin.capture.watch import label
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.private import NEEDS_DATA, Version, version
from lightning_plugin.trees import tree_map

INPLACE_DUNDERS = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip


def writes_to_real(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """True of a call that would write lazy values into an ordinary tensor."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.endswith("__")) or name in INPLACE_DUNDERS
    first = args[0] if args else None
    out = kwargs.get("out")
    return (inplace and isinstance(first, Tensor) and not isinstance(first, LazyTensor)) or (
        isinstance(out, Tensor) and not isinstance(out, LazyTensor)
    )


def call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call, or run it where all it needs is known."""
    args, kwargs = tree_map(lambda a: known(a, func), (tuple(args), kwargs))
    if func is Tensor.__getitem__:
        args = args[0], without_masks(args[1], args[0])
    elif func is Tensor.__setitem__:
        args = args[0], fitting(args[1], args[0]), args[2]
    waiting = lazies((args, kwargs))
    if not waiting:
        return func(*args, **kwargs)
    session = session_of(waiting)
    if writes_to_real(func, args, kwargs):
        session.remember(kwargs.get("out", args[0]))
        args, kwargs = tree_map(materialize, (args, kwargs))
        return func(*args, **kwargs)
    settle_buffers((args, kwargs), session)
    owners: dict[int, LazyTensor] = {}

    def to_fake(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if isinstance(a, LazyTensor):
            owners[id(a._fake)] = a
            return a._fake
        fake = session.capture(a).fake
        captured[id(fake)] = a
        return fake

    captured: dict[int, Tensor] = {}
    fake_args, fake_kwargs = tree_map(to_fake, (args, kwargs))
    try:
        out = record(session, func, fake_args, fake_kwargs)
    except NEEDS_DATA:
        return call_whole(func, args, kwargs)
    except WritesImage:
        return call_on_image(func, args, kwargs)

    def to_lazy(o: Any) -> Any:
        if not isinstance(o, Tensor):
            return o
        if id(o) in owners:
            return owners[id(o)]
        if id(o) in captured:
            return captured[id(o)]
        return lazy(o, session)

    return tree_map(to_lazy, out)


def call_on_image(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a call that writes into an image: the tensor that it lies in is written to, as in PyTorch, and the
    image is another one from now on."""
    owners: dict[int, LazyTensor] = {}

    def own(a: Any) -> Any:
        found = lies_in(a._session.root(), a._fake) if isinstance(a, LazyTensor) else None
        if found is None:
            return materialize(a)
        owners[id(found)] = a
        return found

    args, kwargs = tree_map(own, (args, kwargs))
    return tree_map(lambda o: owners.get(id(o), o), func(*args, **kwargs))


def call_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a call that needs data, on the ordinary tensors of lazy ones.

    Raises:
        RecordingError: It has written to a map, which nobody would see: what it was given is a copy.
    """
    copies: list[tuple[Tensor, Version | None]] = []

    def whole(a: Any) -> Any:
        found = materialize(a)
        if isinstance(a, LazyTensor) and a._value.is_map:
            copies.append((found, version(found)))
        return found

    args, kwargs = tree_map(whole, (args, kwargs))
    out = func(*args, **kwargs)
    if any(version(copy) != before for copy, before in copies):
        raise RecordingError(
            f"{label(func)} writes in place into a map and asks for the number that a tensor holds, which cannot be "
            "recorded: hand it the number (.item()), or use its form that returns a new tensor"
        )
    return out


def lazy(fake: Tensor, session: Session) -> LazyTensor:
    """The lazy tensor of a recorded result."""
    value = bound(fake)
    if not isinstance(value, Value):
        raise RecordingError("an operator returned a tensor that was not recorded")
    tensor = LazyTensor._wrap(LazyTensor, fake, session, value.requires_grad)
    if not value.is_map:
        session.pending.append(weakref.ref(tensor))
    return tensor
