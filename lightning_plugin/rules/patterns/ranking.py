"""Picking positions: the best k and the values at given indices; products of all.

Indices count positions of the whole map in row-major order. Among equal values the first position wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.ops import ReduceOp, Reduction
from lightning_plugin.private import FakeTensor
from lightning_plugin.rules.axes import over
from lightning_plugin.rules.channels import name_of, reduced
from lightning_plugin.rules.reductions import (
    SpaceOp,
    covers,
    find,
    flat_index,
    kept,
    reduced_size,
    restored,
    widen,
)
from lightning_plugin.rules.table import ATEN, Recorder

aten = torch.ops.aten


@dataclass(frozen=True)
class Best(ReduceOp):
    """The k largest (or smallest) along one dimension, best first, with their indices."""

    dim: int
    k: int
    largest: bool
    layout: Layout

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = tiles[0].movedim(self.dim, -1)
        positions = flat_index(self.layout, (self.dim,), box, x.device)
        best, where = x.sort(dim=-1, descending=self.largest, stable=True)
        # Copies, so that nothing of the tile's size outlives the tile.
        return Reduction((best[..., : self.k].clone(), positions[where[..., : self.k]]))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        best, where = (torch.cat(pair, -1) for pair in zip(left.parts, right.parts, strict=True))
        where, order = where.sort(-1)
        best, order = best.gather(-1, order).sort(dim=-1, descending=self.largest, stable=True)
        return Reduction((best[..., : self.k].clone(), where.gather(-1, order)[..., : self.k].clone()))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        best, where = (p.movedim(-1, self.dim).contiguous() for p in total.parts)
        return best, where

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        place, mine = find(flat_index(self.layout, (self.dim,), box, tiles[0].device), outputs[1])
        return torch.where(mine, tiles[0].gather(self.dim, place), 0), None


@ATEN.rule(aten.topk.default)
def topk(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Over a dimension that holds all of space."""
    given = dict(zip(("x", "k", "dim", "largest"), args, strict=False)) | kwargs
    x, k, largest = args[0], args[1], bool(given.get("largest", True))
    dim = given.get("dim", -1) % len(x.shape)
    if not covers(x, [dim]):
        return NotImplemented
    return rec.emit(Best(dim, k, largest, x.space), [x], outs, None, "topk")


@dataclass(frozen=True)
class Pick(ReduceOp):
    """Values at given positions; ``each`` where every other element has indices of its own (gather)."""

    dim: int
    each: bool
    layout: Layout

    def share(self, box: Box, x: Tensor, index: Tensor) -> Tensor:
        size = self.layout.shape[self.dim]
        index = torch.where(index < 0, index + size, index)
        place, mine = find(flat_index(self.layout, (self.dim,), box, x.device), index)
        if self.each:
            return torch.where(mine, x.gather(self.dim, place), 0)
        mine = mine.view([-1, *[1] * (x.dim() - 1 - self.dim)])
        return torch.where(mine, x.index_select(self.dim, place), 0)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        index = vectors[0]
        size = self.layout.shape[self.dim]
        known = index.numel() and not isinstance(index, FakeTensor)
        if known and not (-size <= int(index.min()) and int(index.max()) < size):
            raise IndexError(
                f"an index into {size} positions is out of range: {int(index.min())} to {int(index.max())}"
            )
        return Reduction((self.share(box, tiles[0], index),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        # A position has one owner, so one of the two is zero.
        (a,), (b,) = left.parts, right.parts
        return Reduction((a | b if a.dtype == torch.bool else a + b,))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (self.share(box, tiles[0], vectors[0]),)


@ATEN.rule(aten.gather.default, aten.index_select.default)
def pick(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Positions are picked by an index that is a vector."""
    x, dim, index = args[:3]
    dim %= max(1, len(x.shape))
    if not x.is_map or index.is_map or not covers(x, [dim]) or not outs[0].numel():
        return NotImplemented
    return rec.emit(Pick(dim, name_of(func) == "gather", x.space), [x, index], outs, None, name_of(func))


@ATEN.rule(aten.index.Tensor)
def pick_rows(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``x[:, index]`` with one index, on the dimension that holds all of space."""
    x, indices = args
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) != 1 or not x.is_map or not outs[0].numel():
        return NotImplemented
    dim, index = given[0]
    if index.is_map or index.dtype != torch.int64 or not covers(x, [dim]):
        return NotImplemented
    flat = rec.vector(torch.flatten, [index], {}, [rec.fake([index.fake.numel()], torch.int64, index.device)])[0]
    shape = (*x.shape[:dim], index.fake.numel(), *x.shape[dim + 1 :])
    picked = rec.emit(Pick(dim, False, x.space), [x, flat], [rec.fake(shape, x.dtype, x.device)], None, "index")[0]
    return rec.vector(torch.reshape, [picked, list(outs[0].shape)], {}, outs, name="view")


@dataclass(frozen=True)
class Prod(SpaceOp):
    """(Π x, Π of all but zeros, how many zeros): enough for the derivative, which is Π of all others."""

    @property
    def blank(self) -> tuple[float, ...]:
        return 1.0, 0.0

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = widen(tiles[0])
        rest = torch.where(x == 0, 1, x).movedim(self.dims, tuple(range(-len(self.dims), 0)))
        product = rest.flatten(-len(self.dims)).prod(-1)
        return Reduction((product.double() if x.is_floating_point() else product, (x == 0).sum(self.dims)))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        (p, n), (q, m) = left.parts, right.parts
        return Reduction((p * q, n + m))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest, zeros = (restored(p, self.dims) if self.keep else p for p in total.parts)
        return torch.where(zeros > 0, 0, rest).to(self.dtype), rest, zeros

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        x = widen(tiles[0])
        rest, zeros = (kept(o, self).to(x.dtype) for o in outputs[1:])
        others = torch.where(x == 0, torch.where(zeros == 1, rest, 0), torch.where(zeros == 0, rest / x.detach(), 0))
        return (x * others.detach()).sum(self.dims, keepdim=self.keep).to(self.dtype), None, None


@ATEN.rule(aten.prod.dim_int, aten.prod.default)
def prod(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims, keep = reduced(func, args, kwargs)
    if x.dtype == torch.bool or outs[0].is_complex() or kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented
    shape, dtype = outs[0].shape, torch.float64 if x.dtype.is_floating_point else torch.int64
    fakes = [outs[0], rec.fake(shape, dtype, x.device), rec.fake(shape, torch.int64, x.device)]
    found = over(rec, Prod(dims, keep, outs[0].dtype, reduced_size(x, dims)), x, fakes, "prod")
    return found if found is NotImplemented else found[:1]
