"""Values that are changed behind autograd's back: ``x.data = t``, and writes in place without grad.

PyTorch lets the values of a tensor change and leaves its gradient as it was: the derivative of the result in ``x`` is
taken to be one, whatever was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_plugin.graph import Value
from lightning_plugin.private import first_order
from lightning_plugin.rules.pointwise import broadcast, local
from lightning_plugin.rules.table import API, Recorder


class Replaced(torch.autograd.Function):
    """``new``, with the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor) -> Tensor:
        return new.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def replaced(x: Tensor, new: Tensor) -> Tensor:
    """A tensor with the values of ``new``, which has the shape and type of ``x``, and the gradient of ``x``."""
    if has_torch_function((x, new)):
        return handle_torch_function(replaced, (x, new), x, new)  # type: ignore[no-any-return]
    return Replaced.apply(x, new)  # type: ignore[no-any-return]


@API.stand_in(replaced)
def same_shape(x: Tensor, new: Tensor) -> Tensor:
    """Stand-in that a recording sees."""
    if x.shape != new.shape or x.dtype != new.dtype:
        raise TypeError(f".data of shape {tuple(x.shape)}, {x.dtype}, was set to {tuple(new.shape)}, {new.dtype}")
    return torch.empty_like(x)


@API.rule(replaced, kind="local")
def record_replaced(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, new = args
    return hidden(rec, x, new, outs[0])


def hidden(rec: Recorder, x: Value, new: Value, out: Tensor) -> Any:
    """The new value of something that was written to behind autograd's back, in whatever grad mode."""
    former, rec.grad = rec.grad, True
    try:
        if not x.is_map and not new.is_map:
            return rec.vector(Replaced.apply, (x, new), {}, [out], name="replaced")[0]
        found = broadcast(rec, [x, new], x.shape)
        return NotImplemented if found is None else local(rec, Replaced.apply, found[0], {}, out, found[1])
    finally:
        rec.grad = former
