"""Masks of real tensors as the numbers of what they let through, whose count a recording has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.private import FakeTensor
from lightning_plugin.trees import tree_leaves

#: The types of masks.
MASKS = (torch.bool, torch.uint8)


def without_masks(index: Any, shape: Sequence[int]) -> Any:
    """An index of ``x[index]`` that means the same and has no mask of a real tensor; ``shape`` is that of ``x``.

    Raises:
        IndexError: A mask has not the shape of the dimensions that it lies on.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(is_mask, parts)):
        return index
    found: list[Any] = []
    for place, part in enumerate(parts):
        if is_mask(part):
            check(part, shape, dimension(parts, place, len(shape)))
            found += part.bool().nonzero(as_tuple=True)
        else:
            found.append(part)
    return tuple(found)


def dimension(index: Sequence[Any], place: int, dimensions: int) -> int:
    """The dimension at which a part of an index begins."""
    before = sum(map(takes, index[:place]))
    if any(part is Ellipsis for part in index[:place]):
        return before + dimensions - sum(map(takes, index))
    return before


def takes(part: Any) -> int:
    """How many dimensions a part of an index lies on."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor):
        return part.dim() if part.dtype in MASKS else 1
    if isinstance(part, (list, tuple)) and all(isinstance(leaf, bool) for leaf in tree_leaves(part)):
        return np.ndim(part)
    if isinstance(part, np.ndarray) and part.dtype in (np.bool_, np.uint8):
        return part.ndim
    return 1


def check(mask: Tensor, shape: Sequence[int], begin: int) -> None:
    """Refuse a mask that PyTorch refuses: its numbers alone would not show that it is of another shape."""
    lies_on = tuple(shape[begin : begin + mask.dim()])
    if tuple(mask.shape) != lies_on:
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} lies on dimensions of shape {lies_on}, from dimension {begin} of "
            f"a tensor of shape {tuple(shape)}: it has to have theirs"
        )


def is_mask(part: Any) -> bool:
    return type(part) is Tensor and part.dtype in MASKS and part.dim() > 0 and not fake(part)


def fake(part: Tensor) -> bool:
    return isinstance(part, FakeTensor) or part.is_meta
