"""The ordinary tensors that lazy ones stand for or have become: `materialize`, and what is known already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.capture.paths import label
from lightning_plugin.graph import Value
from lightning_plugin.private import compiles


@contextmanager
def recording_eagerly() -> Iterator[None]:
    """Modules that `torch.compile` made run uncompiled: tiles are what is executed, not the recording."""
    if not compiles():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


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
        results = session.run([found[i]._value for i in places])
        session.forget()
        for i, result in zip(places, results, strict=True):
            found[i] = result
    return found


def known(value: Any, func: Callable[..., Any] | None = None) -> Any:
    """A lazy vector that was executed, as the tensor it has become; anything else unchanged."""
    if isinstance(value, LazyTensor):
        real = computed(value, value._current(label(func) if func else "this call", func))
        return value if real is None else real
    return value


def computed(tensor: LazyTensor, value: Value) -> Tensor | None:
    """Result of a small value, if it was computed."""
    return tensor._session.root().vectors.get(value)
