"""Indexing: index, gather, scatter, one-hot codes, embeddings, top k.

Positions selected along an axis by known indices (``patches[[0, 3]]``) are a map with the same axis. A tile reads the
interval from its smallest index to its largest: ascending indices keep tiles small. The result is a vector, by a
reduction, if it is small, if the indices are computed from the image, and for the k largest. Indices count positions of
the whole map in row-major order; among equal values the first position wins.

A map of indices into channels or into a table is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import Captured, ReduceOp, Reduction, SeparableOp
from lightning_plugin.private import FakeTensor, operator_name
from lightning_plugin.rules.channels import arguments, is_plain, local_on_plain, resized
from lightning_plugin.rules.pointwise import as_map, local
from lightning_plugin.rules.reductions import covers_space, flat_index, locate
from lightning_plugin.rules.table import API, ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under, flatten_dim

aten = torch.ops.aten

#: A selection with fewer bytes than either, the latter as a share of the map, is a vector.
FEW_BYTES, FEW_PART = 1 << 20, 1 / 16


@dataclass(frozen=True, slots=True)
class PickedIndices:
    """Index arithmetic of a selection along one axis."""

    numbers: tuple[int, ...]

    def need(self, lo: int, hi: int) -> tuple[int, int]:
        return min(self.numbers[lo:hi]), max(self.numbers[lo:hi]) + 1

    def mark(self, lo: int, hi: int) -> tuple[int, ...]:
        """Indices relative to the smallest."""
        least = min(self.numbers[lo:hi])
        return tuple(n - least for n in self.numbers[lo:hi])


@dataclass(frozen=True)
class IndexSelect(SeparableOp):
    """`torch.index_select` along an axis, which is dimension ``dim``."""

    kind: ClassVar[str] = "layout"
    maps: tuple[PickedIndices]
    dim: int

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        (interval,) = self.intervals(box)
        index = torch.tensor(self.maps[0].mark(*interval), device=tiles[0].device)
        return tiles[0].index_select(self.dim, index)


def select_along_axis(rec: Recorder, x: Value, dim: int, index: Value, out: Tensor, name: str) -> Any:
    if not x.is_map or not axes_under(x, [dim]) or len(index.shape) != 1 or index.dtype != torch.int64:
        return NotImplemented
    if index.node is None or not isinstance(index.node.op, Captured) or not out.numel():
        return NotImplemented
    bytes_picked = out.numel() * out.element_size()
    if bytes_picked < min(FEW_BYTES, FEW_PART * x.bytes):
        return NotImplemented
    given = rec.read(index).tolist()
    line = flatten_dim(rec, x, dim)
    axis = None if line is None else line.space.axis_of(dim)
    if line is None or axis is None:
        return NotImplemented
    size = x.shape[dim]
    if not all(-size <= n < size for n in given):
        return NotImplemented  # PyTorch raises the error
    numbers = tuple(n % size for n in given)
    extent = (*line.space.extent[:axis], len(numbers), *line.space.extent[axis + 1 :])
    return rec.emit(
        IndexSelect((PickedIndices(numbers),), (axis,), dim), [line], [out], line.space.with_extent(extent), name
    )


@dataclass(frozen=True)
class PickReduction(ReduceOp):
    """Values at given positions, accumulated over the tiles that have them.

    Attributes:
        dim: Dimension that is indexed, which has all axes.
        each: Other elements have indices of their own, as in `torch.gather`.
        layout: Layout of the map.
    """

    dim: int
    each: bool
    layout: Layout

    def pick(self, box: Box, x: Tensor, index: Tensor) -> Tensor:
        size = self.layout.shape[self.dim]
        index = torch.where(index < 0, index + size, index)
        place, mine = locate(flat_index(self.layout, (self.dim,), box, x.device), index)
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
        return Reduction((self.pick(box, tiles[0], index),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        # A position is in one tile, so one of the two is zero.
        (a,), (b,) = left.parts, right.parts
        return Reduction((a | b if a.dtype == torch.bool else a + b,))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (self.pick(box, tiles[0], vectors[0]),)


def pick_as_vector(rec: Recorder, x: Value, dim: int, index: Value, out: Tensor, name: str) -> Any:
    """Record a selection by a vector of indices as a reduction."""
    if not x.is_map or index.is_map or not covers_space(x, [dim]) or not out.numel():
        return NotImplemented
    return rec.emit(PickReduction(dim, name == "gather", x.space), [x, index], [out], None, name)


@ATEN.rule(aten.index_select.default, kind="local, layout or reduce")
def index_select(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index = args
    dim %= max(1, len(x.shape))
    found = local_on_plain(rec, func, args, kwargs, outs, [dim]) if x.is_map else NotImplemented
    if found is NotImplemented:
        found = select_along_axis(rec, x, dim, index, outs[0], "index_select")
    return pick_as_vector(rec, x, dim, index, outs[0], "index_select") if found is NotImplemented else found


@ATEN.rule(aten.index.Tensor, kind="local, layout or reduce")
def index(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``patches[indices]``, ``x[:, indices]``; ``weight[classes]`` with a map of classes."""
    x, indices = args
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) == 1 and (found := select_along_axis(rec, x, *given[0], outs[0], "index")) is not NotImplemented:
        return found
    found = look_up(rec, func, x, indices, given, outs[0])
    return pick_by_index(rec, x, *given[0], outs[0]) if found is NotImplemented and len(given) == 1 else found


def look_up(
    rec: Recorder, func: Any, x: Value, indices: Sequence[Value | None], given: list[tuple[int, Value]], out: Tensor
) -> Any:
    """Record ``weight[classes]`` with a map of classes, and ``x[:, order]`` with indices of channels, as local."""
    dims = [d for d, _ in given]
    if dims != list(range(dims[0], dims[0] + len(dims))) or any(i.dtype == torch.bool for _, i in given):
        return NotImplemented
    before, after = x.shape[: dims[0]], x.shape[dims[-1] + 1 :]
    if not x.is_map:
        spaces = {i.space if i.is_map else None for _, i in given}
        if len(spaces) != 1 or None in spaces:
            return NotImplemented
        (space,) = spaces
        assert space is not None
        layout = Layout((*((n,) for n in before), *space.dims, *((n,) for n in after)), space.extent)
        return local(rec, func, [x, list(indices)], {}, out, layout, name="index")
    if len(given) != 1 or given[0][1].is_map or not is_plain(x, dims[0]):
        return NotImplemented
    middle = tuple((n,) for n in given[0][1].shape)
    layout = Layout((*x.space.dims[: dims[0]], *middle, *x.space.dims[dims[0] + 1 :]), x.space.extent)
    return local(rec, func, [x, list(indices)], {}, out, layout, name="index")


def pick_by_index(rec: Recorder, x: Value, dim: int, index: Value, out: Tensor) -> Any:
    """Record ``x[:, index]`` with indices of any shape into the dimension with all of space as a reduction."""
    if index.is_map or index.dtype != torch.int64:
        return NotImplemented
    flat = rec.vector(torch.flatten, [index], {}, [rec.fake([index.fake.numel()], torch.int64, index.device)])[0]
    shape = (*x.shape[:dim], index.fake.numel(), *x.shape[dim + 1 :])
    found = pick_as_vector(rec, x, dim, flat, rec.fake(shape, x.dtype, x.device), "index")
    if found is NotImplemented:
        return NotImplemented
    return rec.vector(torch.reshape, [found[0], list(out.shape)], {}, [out], name="view")


def align_but_for(rec: Recorder, operands: Sequence[Value], dim: int) -> list[Value] | None:
    """Return operands of one rank as maps of equal layouts except in ``dim``; None if that is not possible."""
    first = next(v for v in operands if v.is_map)
    space = first.space.axis_dims
    if dim in space:
        return None
    if any(len(v.shape) != len(first.shape) or any(v.shape[d] != first.shape[d] for d in space) for v in operands):
        return None
    return [as_map(rec, v, resized(first.space, v.shape)) for v in operands]


@API.rule(F.one_hot, kind="local")
def one_hot(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    names = ("tensor", "num_classes")
    a = {"num_classes": -1} | dict(zip(names, args, strict=False)) | kwargs
    x = a.get("tensor", a.get("input", a.get("self")))
    if a["num_classes"] < 0 or not x.is_map:
        return NotImplemented
    layout = Layout((*x.space.dims, (outs[0].shape[-1],)), x.space.extent)
    return local(rec, F.one_hot, [x, a["num_classes"]], {}, outs[0], layout, name="one_hot", grad=False)


@ATEN.rule(aten.gather.default, kind="local or reduce")
def gather(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index = args[:3]
    dim %= max(1, len(x.shape))
    maps = align_but_for(rec, [x, index], dim)
    if maps is None:
        return pick_as_vector(rec, x, dim, index, outs[0], "gather")
    return local(rec, func, [maps[0], dim, maps[1]], {}, outs[0], maps[1].space, name="gather")


@ATEN.rule(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    kind="local",
)
def scatter(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, dim, index, source, *rest = args
    dim %= max(1, len(x.shape))
    maps = align_but_for(rec, [x, index, *([source] if isinstance(source, Value) else [])], dim)
    if maps is None:
        return NotImplemented
    what = maps[2] if isinstance(source, Value) else source
    return local(
        rec,
        func,
        [maps[0], dim, maps[1], what, *rest],
        kwargs,
        outs[0],
        resized(maps[0].space, outs[0].shape),
        name=operator_name(func),
    )


@API.rule(F.embedding, kind="local")
def embedding(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    if not x.is_map or a["weight"].is_map or a["max_norm"] is not None or a["sparse"] or a["scale_grad_by_freq"]:
        return NotImplemented
    layout = Layout((*x.space.dims, (outs[0].shape[-1],)), x.space.extent)
    padding = {"padding_idx": a["padding_idx"]}
    return local(rec, F.embedding, [x, a["weight"]], padding, outs[0], layout, name="embedding", autocast=rec.autocast)


@ATEN.rule(aten.bucketize.Tensor, kind="local")
def bucketize(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, bounds = args
    if not x.is_map or bounds.is_map:
        return NotImplemented
    return local(rec, func, [x, bounds], kwargs, outs[0], x.space, name="bucketize", grad=False)


@dataclass(frozen=True)
class TopK(ReduceOp):
    """The k largest (or smallest) values along one dimension, sorted, with their indices."""

    dim: int
    k: int
    largest: bool
    layout: Layout

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = tiles[0].movedim(self.dim, -1)
        positions = flat_index(self.layout, (self.dim,), box, x.device)
        best, where = x.sort(dim=-1, descending=self.largest, stable=True)
        # Copies, since views would keep tensors of the tile's size alive.
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
        place, mine = locate(flat_index(self.layout, (self.dim,), box, tiles[0].device), outputs[1])
        return torch.where(mine, tiles[0].gather(self.dim, place), 0), None


@ATEN.rule(aten.topk.default, kind="local or reduce")
def topk(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Over channels, or over a dimension with all of space."""
    x, k, dim, largest, _ = arguments(func, args, kwargs).values()
    dim %= len(x.shape)
    found = local_on_plain(rec, func, args, kwargs, outs, [dim])
    if found is not NotImplemented or not covers_space(x, [dim]):
        return found
    return rec.emit(TopK(dim, k, bool(largest), x.space), [x], outs, None, "topk")
