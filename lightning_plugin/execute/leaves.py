"""Where the user's own tensors and the engine's meet: those that were captured, and those that are given back."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_plugin.private import is_view


def as_used(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A captured tensor, requiring grad if and only if it did when it was used.

    A parameter that was frozen since gets its gradient if it is free again when backward comes, as in PyTorch.
    """
    if tensor.requires_grad == requires_grad:
        return tensor
    if not requires_grad:
        return tensor.detach()
    tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            return tensor.view_as(tensor)
    finally:
        tensor.requires_grad_(False)


def lasting(result: Tensor) -> Tensor:
    """A result that the user may write to: no view of something else."""
    return result.clone() if is_view(result) else result
