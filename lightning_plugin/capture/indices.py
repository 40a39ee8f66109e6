"""Indices of ``x[index]`` spelled out, as PyTorch takes them apart before it picks or writes.

PyTorch makes a tensor of each list and array in an index, and a number of each tensor that holds one. For that it asks
them for their data, which tensors that are being recorded do not have. So the same is done here, at the call, which is
when PyTorch does it: what is written to them later changes nothing there either, and nothing has to be remembered.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.private import FakeTensor

#: The types of masks.
MASKS = (torch.bool, torch.uint8)

#: The types of tensors that pick.
PICKS = (*MASKS, torch.int32, torch.int64)

#: Types that PyTorch makes a tensor of.
LISTS = (Sequence, np.ndarray)

#: A list of so many parts is one of numbers to PyTorch, whatever it holds.
LONG = 32


def spelled_out(index: Any, x: Tensor) -> Any:
    """An index that means the same for ``x`` and has neither lists and arrays nor tensors of one number, unless that
    is not known. Its own ellipsis, too, is spelled out, unless there was nothing to do."""
    parts = parts_of(index)
    counted = sum(map(counts, parts))
    if not any(map(to_spell, parts)) or counted > x.dim():  # PyTorch says that these are too many
        return index
    found: list[Any] = []
    for part in parts:
        found += [slice(None)] * (x.dim() - counted) if part is Ellipsis else [spelled(part, x.device)]
    while isinstance(found[-1], slice) and found[-1] == slice(None):
        found.pop()  # PyTorch passes over it, also where there is no dimension any more
    return tuple(found)


def parts_of(index: Any) -> tuple[Any, ...]:
    """The parts of an index. PyTorch takes a list for a tuple if it holds more than numbers."""
    if isinstance(index, tuple):
        return index
    more = (Tensor, *LISTS, slice, EllipsisType, NoneType)
    if isinstance(index, Sequence) and len(index) < LONG and any(isinstance(part, more) for part in index):
        return tuple(index)
    return (index,)


def counts(part: Any) -> int:
    """Number of dimensions that PyTorch counts a part for, to find those that an ellipsis stands for: a list is one,
    also where it is a mask of several."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in MASKS else 1


def to_spell(part: Any) -> bool:
    return isinstance(part, (Tensor, *LISTS)) or any(isinstance(end, Tensor) for end in ends(part))


def ends(part: Any) -> tuple[Any, ...]:
    """The numbers of a slice."""
    return (part.start, part.stop, part.step) if isinstance(part, slice) else ()


def spelled(part: Any, device: torch.device) -> Any:
    """A part of an index as PyTorch understands it."""
    if isinstance(part, slice):
        return slice(*(operator.index(end) if isinstance(end, Tensor) else end for end in ends(part)))
    if isinstance(part, LISTS):
        part = tensor_of(part, device)
    return number_of(part) if isinstance(part, Tensor) and part.dim() == 0 and has_data(part) else part


def tensor_of(numbers: Any, device: torch.device) -> Tensor:
    """Convert a list in an index as PyTorch does: to a mask of truths, whole numbers of all else."""
    found = torch.tensor(numbers, device=device)
    return found if found.dtype in (*MASKS, torch.int64) else torch.tensor(numbers, dtype=torch.int64, device=device)


def number_of(tensor: Tensor) -> Any:
    """A tensor without dimensions as a number, or a truth, if it may be an index."""
    if tensor.dtype in MASKS:
        return bool(tensor)
    return tensor if tensor.is_floating_point() or tensor.is_complex() else int(tensor)


def has_data(tensor: Tensor) -> bool:
    """True of a tensor whose numbers are known, or can be computed."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


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
