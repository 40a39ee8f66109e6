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

#: What PyTorch makes a tensor of.
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
    """For how many dimensions PyTorch counts a part, to find those that an ellipsis stands for: a list is one, also
    where it is a mask of several."""
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
    """What PyTorch makes of a list in an index: a mask of truths, whole numbers of all else."""
    found = torch.tensor(numbers, device=device)
    return found if found.dtype in (*MASKS, torch.int64) else torch.tensor(numbers, dtype=torch.int64, device=device)


def number_of(tensor: Tensor) -> Any:
    """A tensor without dimensions as a number, or a truth, if it may be an index."""
    if tensor.dtype in MASKS:
        return bool(tensor)
    return tensor if tensor.is_floating_point() or tensor.is_complex() else int(tensor)


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are known, or can be computed."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
