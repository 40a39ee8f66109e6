"""The ordinary tensors that lazy ones stand for or have become: `materialize`, and what is known already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    if not isinstance(tensor, LazyTensor):
        return tensor
    value = tensor._value
    session = tensor._session.root()
    if value in session.vectors:
        return session.vectors[value]
    result = session.run(value)
    session.forget()
    return result


def known(value: Any, func: Callable[..., Any] | None = None) -> Any:
    """A lazy vector that was executed, as the tensor it has become; anything else unchanged."""
    if isinstance(value, LazyTensor):
        real = computed(value, value._current(label(func) if func else "this call", func))
        return value if real is None else real
    return value


def computed(tensor: LazyTensor, value: Value) -> Tensor | None:
    """Result of a small value, if it was computed."""
    return tensor._session.root().vectors.get(value)
