"""Operators in the form in which they are recorded: out of place, and kind to strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.private import operator_name, schema


def copied(x: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """What ``x.copy_(new)`` leaves in ``x``."""
    return new.to(x.device, x.dtype).expand_as(x).clone()


#: What is run on vectors in place of an operator: real vectors need not have the strides of their fakes, and a view is
#: particular about strides; the out-of-place copy has no derivative.
ON_VECTORS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.copy.default: copied,
}

#: In-place operators that overwrite a map with something of the same shape and type, whose backward needs the result
#: or nothing. They save memory where the user's code uses them, so they are run as the user wrote them.
IN_PLACE = {
    getattr(torch.ops.aten, name).default
    for name in (
        "relu_ leaky_relu_ elu_ celu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_ sigmoid_ tanh_ threshold_ relu6_"
    ).split()
    if hasattr(getattr(torch.ops.aten, name, None), "default")
} | {torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor, torch.ops.aten.sub_.Tensor, torch.ops.aten.div_.Tensor}


def functional(func: Any) -> Any:
    """The operator that computes what an in-place operator writes."""
    packet = getattr(torch.ops.aten, operator_name(func).removesuffix("_"), None)
    if schema(func).name == "aten::copy_":
        return torch.ops.aten.copy.default
    overload = schema(func).overload_name or "default"
    return getattr(packet, overload, None) if packet is not None else None
