"""Positions picked along an axis by numbers that are known: ``patches[index]``, ``patches[[0, 3]]``.

What is picked is a map again, along the same axis. A tile reads the positions from the least to the greatest of its own
numbers, so that ascending numbers keep tiles small. A few positions of a large map are a vector instead (`ranking`), as
are those whose numbers are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ops import Captured, TileOp
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under, flattened

aten = torch.ops.aten

#: A picked result is a vector where it has fewer bytes, and is less than such a part of the map.
FEW_BYTES, FEW_PART = 1 << 20, 1 / 16


@dataclass(frozen=True)
class Picked(TileOp):
    """Positions ``numbers`` along an axis, which is dimension ``dim``."""

    kind: ClassVar[str] = "layout"
    axis: int
    dim: int
    numbers: tuple[int, ...]

    def need(self, box: Box) -> tuple[Box, ...]:
        here = self.numbers[box.lo[self.axis] : box.hi[self.axis]]
        return (box.replace(self.axis, min(here), max(here) + 1),)

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The numbers, from the least on."""
        if axis != self.axis:
            return None
        here = self.numbers[lo:hi]
        least = min(here)
        return tuple(n - least for n in here)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        here = self.numbers[box.lo[self.axis] : box.hi[self.axis]]
        least = min(here)
        index = torch.tensor([n - least for n in here], device=tiles[0].device)
        return tiles[0].index_select(self.dim, index)


@ATEN.rule(aten.index_select.default)
def select(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index = args
    return picked(rec, x, dim % max(1, len(x.shape)), index, outs[0], name_of(func))


@ATEN.rule(aten.index.Tensor)
def pick(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, indices = args
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    return picked(rec, x, *given[0], outs[0], "index") if len(given) == 1 else NotImplemented


def picked(rec: Recorder, x: Value, dim: int, index: Value, out: Tensor, name: str) -> Any:
    if not x.is_map or not axes_under(x, [dim]) or len(index.shape) != 1 or index.dtype != torch.int64:
        return NotImplemented
    known = captured(index)
    if known is None or not out.numel():
        return NotImplemented
    bytes_picked = out.numel() * out.element_size()
    if bytes_picked < min(FEW_BYTES, FEW_PART * x.bytes):
        return NotImplemented
    rec.settled([known])
    line = flattened(rec, x, dim)
    axis = None if line is None else line.space.axis_of(dim)
    if line is None or axis is None:
        return NotImplemented
    size = x.shape[dim]
    given = rec.session.tensor(known).tolist()
    if not all(-size <= n < size for n in given):
        return NotImplemented  # PyTorch says what is wrong with it
    numbers = tuple(n % size for n in given)
    extent = (*line.space.extent[:axis], len(numbers), *line.space.extent[axis + 1 :])
    return rec.emit(Picked(axis, dim, numbers), [line], [out], line.space.with_extent(extent), name)


def captured(index: Value) -> Value | None:
    """The captured tensor whose numbers an index has."""
    return index if index.node is not None and isinstance(index.node.op, Captured) else None
