"""Normal form of the index in ``x[index]``.

PyTorch converts lists and arrays in an index to tensors, and tensors without dimensions to numbers. For that it reads
their data, which recorded tensors do not have. The same conversion is made here, at the call, as in PyTorch: later
writes to a list or an array have no effect there either.
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

#: Types of masks.
MASK_DTYPES = (torch.bool, torch.uint8)

#: Types of tensors that may be indices.
INDEX_DTYPES = (*MASK_DTYPES, torch.int32, torch.int64)

#: Types that PyTorch converts to tensors.
SEQUENCES = (Sequence, np.ndarray)

#: Length from which PyTorch takes a list for one of numbers, without looking for slices in it.
MAX_MIXED_LIST = 32


def expand_index(index: Any, x: Tensor) -> Any:
    """Replace lists, arrays, tensors without dimensions and the ellipsis in an index of ``x``.

    Tensors without data stay. An index without lists, arrays and tensors is returned as it is.
    """
    parts = parts_of(index)
    counted = sum(map(count_dims, parts))
    if not any(map(needs_expansion, parts)) or counted > x.dim():  # too many: PyTorch raises the error
        return index
    found: list[Any] = []
    for part in parts:
        found += [slice(None)] * (x.dim() - counted) if part is Ellipsis else [expand_part(part, x.device)]
    while isinstance(found[-1], slice) and found[-1] == slice(None):
        found.pop()  # PyTorch skips it, even if no dimension is left
    return tuple(found)


def parts_of(index: Any) -> tuple[Any, ...]:
    """Return the parts of an index; PyTorch takes a list for a tuple if it holds more than numbers."""
    if isinstance(index, tuple):
        return index
    more = (Tensor, *SEQUENCES, slice, EllipsisType, NoneType)
    if isinstance(index, Sequence) and len(index) < MAX_MIXED_LIST and any(isinstance(part, more) for part in index):
        return tuple(index)
    return (index,)


def count_dims(part: Any) -> int:
    """Count the dimensions of ``x`` that PyTorch assigns to a part, to find those of the ellipsis: one for a list, even
    for a nested list of truths."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in MASK_DTYPES else 1


def needs_expansion(part: Any) -> bool:
    return isinstance(part, (Tensor, *SEQUENCES)) or any(isinstance(end, Tensor) for end in slice_bounds(part))


def slice_bounds(part: Any) -> tuple[Any, ...]:
    """Return start, stop and step of a slice."""
    return (part.start, part.stop, part.step) if isinstance(part, slice) else ()


def expand_part(part: Any, device: torch.device) -> Any:
    """Convert a part of an index as PyTorch does."""
    if isinstance(part, slice):
        return slice(*(operator.index(end) if isinstance(end, Tensor) else end for end in slice_bounds(part)))
    if isinstance(part, SEQUENCES):
        part = tensor_of(part, device)
    return number_of(part) if isinstance(part, Tensor) and part.dim() == 0 and has_data(part) else part


def tensor_of(numbers: Any, device: torch.device) -> Tensor:
    """Convert a list as PyTorch does: of booleans to a mask, of anything else to int64."""
    found = torch.tensor(numbers, device=device)
    return (
        found if found.dtype in (*MASK_DTYPES, torch.int64) else torch.tensor(numbers, dtype=torch.int64, device=device)
    )


def number_of(tensor: Tensor) -> Any:
    """Convert a tensor without dimensions to a bool or an int; one that may be no index stays."""
    if tensor.dtype in MASK_DTYPES:
        return bool(tensor)
    return tensor if tensor.is_floating_point() or tensor.is_complex() else int(tensor)


def has_data(tensor: Tensor) -> bool:
    """True of a tensor whose data is there, or can be computed."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def index_to_read(index: Any, x: Tensor) -> Any:
    """Expand the index of ``x[index]``, and replace masks with data by their positions.

    Raises:
        IndexError: A mask has another shape than its dimensions, or tensors cannot be broadcast together.
    """
    return masks_to_indices(expand_index(index, x), x)


def masks_to_indices(index: Any, x: Tensor) -> Any:
    """Replace masks with data in an expanded index by their positions; errors are those of `index_to_read`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor) for part in parts):
        return index
    found: list[Any] = []
    begin = 0
    for part in parts:
        if is_mask(part):
            check_mask(part, x.shape, begin)
            found += part.bool().nonzero(as_tuple=True)
        else:
            found.append(part)
        begin += count_dims(part)
    check_broadcast(found)
    return tuple(found)


def index_to_write(index: Any, x: Tensor, several: bool) -> Any:
    """Expand the index of ``x[index] = value``; masks stay, and become positions if ``several`` values are written.

    Raises:
        IndexError: As for `index_to_read`, even if nothing would be written.
    """
    index = expand_index(index, x)
    positions = masks_to_indices(index, x)
    return positions if several else index


def check_mask(mask: Tensor, shape: Sequence[int], begin: int) -> None:
    """Refuse a mask of a wrong shape, as PyTorch does: its positions alone would not show the shape."""
    lies_on = tuple(shape[begin : begin + mask.dim()])
    if tuple(mask.shape) != lies_on:
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} lies on dimensions of shape {lies_on}, from dimension {begin} of "
            f"a tensor of shape {tuple(shape)}: it has to have theirs"
        )


def check_broadcast(parts: Sequence[Any]) -> None:
    """Refuse index tensors that PyTorch refuses, with its error: fake tensors raise a different one."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if any(t.dtype not in INDEX_DTYPES for t in tensors):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if any(t.dtype in MASK_DTYPES for t in tensors):
        return  # a mask without data: the number of its positions is unknown
    shapes = [tuple(t.shape) for t in tensors] + [(int(part),) for part in parts if isinstance(part, bool)]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise IndexError(
            f"an index has tensors, or masks of as many positions, of shapes {', '.join(map(str, shapes))}, which "
            "cannot be broadcast to one shape"
        ) from None


def is_mask(part: Any) -> bool:
    return type(part) is Tensor and part.dtype in MASK_DTYPES and has_data(part)
