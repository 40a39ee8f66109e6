"""Masks of real tensors as the numbers of what they let through, whose count a recording has to know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_plugin.private import FakeTensor


def without_masks(index: Any) -> Any:
    """An index of ``x[index]`` that means the same and has no mask of a real tensor."""
    if isinstance(index, tuple):
        return tuple(n for part in index for n in (numbers(part) if is_mask(part) else (part,)))
    if not is_mask(index):
        return index
    found = numbers(index)
    return found[0] if len(found) == 1 else found


def is_mask(part: Any) -> bool:
    return type(part) is Tensor and part.dtype in (torch.bool, torch.uint8) and part.dim() > 0 and not fake(part)


def fake(part: Tensor) -> bool:
    return isinstance(part, FakeTensor) or part.is_meta


def numbers(mask: Tensor) -> tuple[Tensor, ...]:
    return mask.bool().nonzero(as_tuple=True)
