"""Attributes of lazy tensors: what they have without data, and what may be set of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.calls import call
from lightning_plugin.capture.gradients import no_gradient
from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.materialize import computed, materialize
from lightning_plugin.capture.session import bind
from lightning_plugin.private import plain
from lightning_plugin.rules.replaced import replaced
from lightning_plugin.source import TensorSource

READS = {
    getattr(Tensor, name)
    for name in (
        "size dim stride numel nelement element_size is_floating_point is_complex is_signed "
        "is_contiguous ndimension get_device storage_offset is_inference"
    ).split()
} | {torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__len__}
READS.discard(Tensor.stride)


#: Attributes that are views, as operators.
VIEWS = {name: getattr(torch.ops.aten, name) for name in ("mT", "mH", "real", "imag")} | {
    "T": torch.ops.aten.numpy_T,
    "H": torch.ops.aten.matrix_H,
}


def read_attribute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An attribute that needs no data; one that is a view of the tensor (``.T``, ``.mT``, ``.data``) is recorded."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    self = args[0]
    if name in VIEWS:
        return call(VIEWS[name], args, {})
    if name == "data":
        return self.detach()
    if name in HISTORY:
        return history(self, name)
    with plain():
        return func(*args, **kwargs)


class Recorded:
    """The ``grad_fn`` of a recorded map: it has no place in autograd's graph, and says so when it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise no_gradient(f"'.grad_fn.{name}' of a recorded map was asked for (by a FLOP counter, say, or a hook)")


#: Attributes of a tensor that autograd keeps.
HISTORY = ("grad", "grad_fn", "is_leaf", "requires_grad")


def history(self: LazyTensor, name: str) -> Any:
    """Read an attribute of autograd's: of an image's tensor, a small value that was computed, or a recorded one."""
    value = self._value
    real = computed(self, value)
    if real is not None:
        return getattr(real, name)
    if name == "requires_grad":
        return value.requires_grad
    if name == "grad_fn" and value.requires_grad and not isinstance(self, LazyImage):
        return Recorded()
    if name == "is_leaf":
        return isinstance(self, LazyImage)
    source = getattr(self, "_source", None) if name == "grad" else None
    return source.tensor.grad if isinstance(source, TensorSource) else None


def write_attribute(func: Callable[..., Any], self: LazyTensor, value: Any) -> None:
    """Set what a real tensor has: of a small value, which is computed for it, or of an image's own tensor."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "requires_grad":
        self.requires_grad_(value)
    elif name == "grad" and isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        self._source.tensor.grad = materialize(value)
    elif not self._value.is_map:
        func(materialize(self), materialize(value))
    elif name == "data":
        bind(self._fake, replaced(self, value)._value)  # type: ignore[attr-defined]
    else:
        raise no_gradient(f"'.{name}' of a recorded map was set")
