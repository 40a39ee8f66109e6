"""Masks of real tensors as the numbers of what they let through, whose count a recording has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.indices import MASKS, PICKS, counts, has_data, spelled_out


def without_masks(index: Any, x: Tensor) -> Any:
    """An index of ``x[index]`` that means the same, is spelled out and has no mask of a real tensor.

    Raises:
        IndexError: A mask has not the shape of the dimensions that it lies on, or tensors cannot pick together.
    """
    return numbered(spelled_out(index, x), x)


def numbered(index: Any, x: Tensor) -> Any:
    """An index that is spelled out, without masks of real tensors; errors are those of `without_masks`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor) for part in parts):
        return index
    found: list[Any] = []
    begin = 0
    for part in parts:
        if is_mask(part):
            check(part, x.shape, begin)
            found += part.bool().nonzero(as_tuple=True)
        else:
            found.append(part)
        begin += counts(part)
    check_together(found)
    return tuple(found)


def fitting(index: Any, x: Tensor) -> Any:
    """An index of ``x[index] = value`` that is spelled out, masks and all.

    Raises:
        IndexError: As for `without_masks`, also where nothing would be written.
    """
    index = spelled_out(index, x)
    numbered(index, x)
    return index


def check(mask: Tensor, shape: Sequence[int], begin: int) -> None:
    """Refuse a mask that PyTorch refuses: its numbers alone would not show that it is of another shape."""
    lies_on = tuple(shape[begin : begin + mask.dim()])
    if tuple(mask.shape) != lies_on:
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} lies on dimensions of shape {lies_on}, from dimension {begin} of "
            f"a tensor of shape {tuple(shape)}: it has to have theirs"
        )


def check_together(parts: Sequence[Any]) -> None:
    """Refuse tensors that PyTorch refuses, with its kind of error: without data they make another."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if any(t.dtype not in PICKS for t in tensors):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if any(t.dtype in MASKS for t in tensors):
        return  # it is not known how many positions it lets through
    shapes = [tuple(t.shape) for t in tensors] + [(int(part),) for part in parts if isinstance(part, bool)]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise IndexError(
            f"an index has tensors, or masks that let through as many positions, of shapes "
            f"{', '.join(map(str, shapes))}: they pick together, and cannot be broadcast to one shape"
        ) from None


def is_mask(part: Any) -> bool:
    return type(part) is Tensor and part.dtype in MASKS and has_data(part)
