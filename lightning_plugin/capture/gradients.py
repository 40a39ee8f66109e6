"""Gradients of what was recorded: backward, and what may be asked for a gradient at all.

[Note: rows] A result for each image or patch is a map where the images are what tiles cut. It is small as far as space
goes; where its place in autograd's graph is asked for, it is taken whole, and from then on is an ordinary tensor, as
any small result is. What has read it before would read its tiles, and not be seen there: then it is refused, as maps
are that have space in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.materialize import materialize
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import ancestors
from lightning_plugin.layout import Axis
from lightning_plugin.source import TensorSource
from lightning_plugin.trees import tree_map


def _backward(
    self: LazyTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    materialize(self).backward(
        materialize(gradient), retain_graph, create_graph, inputs=tree_map(_differentiated, inputs)
    )


def _differentiated(a: Any) -> Any:
    """Find the tensor that a gradient is asked of: a recorded small value, or the tensor that an image lies in."""
    if not isinstance(a, LazyTensor):
        return a
    if isinstance(a, LazyImage) and isinstance(a._source, TensorSource):
        return a._source.tensor
    if a._value.is_map:
        raise no_gradient("a gradient was asked of a recorded map")
    return materialize(a)


def no_gradient(what: str) -> RecordingError:
    return RecordingError(
        f"{what}: it is never held whole, and neither is its gradient. Take it whole first: features = materialize(x); "
        "compute what follows from features, and ask for the gradient of features (this is how Grad-CAM works). The "
        "gradient of an image comes from LazyImage.from_tensor(t) with t.requires_grad_()."
    )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = tree_map(materialize, outputs)
    return torch.autograd.grad(outputs, tree_map(_differentiated, inputs), *args, **kwargs)


def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    tensors = tree_map(materialize, tensors)
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = tree_map(_differentiated, kwargs["inputs"])
    torch.autograd.backward(tensors, tree_map(materialize, grad_tensors), *args, **kwargs)


def _requires_grad_(self: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    if requires_grad == self.requires_grad:
        return self
    if isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        raise RecordingError("call requires_grad_() on the tensor before LazyImage.from_tensor(tensor)")
    if self._value.is_map:
        raise no_gradient("requires_grad_() was called on a recorded map")
    materialize(self).requires_grad_(requires_grad)
    return self


def take_whole(rows: LazyTensor, name: str) -> None:
    """Make one result for each image an ordinary tensor; see [Note: rows]."""
    session, value = rows._session.root(), rows._value
    assert value.layout is not None
    axes = {factor.index for dim in value.layout.dims for factor in dim if isinstance(factor, Axis)}
    if not axes <= session.instances:
        raise no_gradient(f"{name}() was called on a recorded map")
    others = [t._value for t in (ref() for ref in session.tensors) if t is not None and t is not rows]
    if any(value in node.inputs for node in ancestors(others)):
        raise no_gradient(f"{name}() was called on a recorded map that was read before")
    session.become(rows._fake, value, materialize(rows))


def _of_small(name: str) -> Callable[..., Any]:
    """A method that needs a tensor's place in autograd's graph: a small value is computed for it."""

    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if self._value.is_map:
            take_whole(self, name)
        return getattr(materialize(self), name)(*args, **kwargs)

    return run


#: Answers to calls for gradients.
GRADIENTS: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _autograd_backward,
    torch.autograd.grad: _grad,
    Tensor.requires_grad_: _requires_grad_,
    **{
        getattr(Tensor, name): _of_small(name)
        for name in ("retain_grad", "register_hook", "register_post_accumulate_grad_hook")
    },
}
