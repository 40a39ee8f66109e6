"""The ordinary tensors that lazy ones stand for or have become: `materialize`, and what is known already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.capture.paths import label
from lightning_plugin.capture.session import bound
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.private import plain


def materialize(tensor: Tensor) -> Tensor:
    """The ordinary tensor of a lazy one: computes it, and whatever small is waiting beside it, under one plan.

    A map is gathered whole on its device; do this only with maps that fit.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    foreign(tensor)
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
        foreign(value, func)
        real = computed(value, value._current(label(func) if func else "this call", func))
        return value if real is None else real
    return value


def computed(tensor: LazyTensor, value: Value) -> Tensor | None:
    """What a small value has become, if it was computed."""
    return tensor._session.root().vectors.get(value)


def foreign(tensor: LazyTensor, func: Callable[..., Any] | None = None) -> None:
    """Refuse a lazy tensor that went through a custom autograd.Function, which cannot be recorded."""
    with plain():
        function = tensor.grad_fn
    if function is None:
        return
    name = function.name().removesuffix("Backward")
    large = isinstance(bound(tensor._fake), Value) and tensor._value.is_map
    whole = "materialize(x), a map that is held whole" if large else "materialize(x), its small input computed first"
    if name == "BackwardHookFunction":
        what = "a full backward hook on a module"
        way_out = f"Remove the hook (hooks on parameters work), or call the module on {whole}."
    else:
        what, way_out = (
            f"the custom autograd function {name}",
            f"Write it with ordinary operators, or apply it to {whole}.",
        )
    raise RecordingError(
        f"a lazy tensor went through {what} before {label(func) if func else 'it was used'}. That hides the "
        f"computation from the recording. {way_out}"
    )
