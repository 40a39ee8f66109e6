"""Adaptive pooling to any size.

The bins of adaptive pooling differ in length and may overlap, so there is no window to slide. A result that is small
against its bins (seven by seven of a whole slide) is a vector to which every tile adds its share; a larger one
is a map, and a tile of it reads the bins it needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.ops import ReduceOp, Reduction, SeparableOp
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import over_last_dims
from lightning_plugin.rules.interpolate import Resample
from lightning_plugin.rules.reduce import record_first
from lightning_plugin.rules.reductions import Projection, more_extreme, to_tile_positions, widen
from lightning_plugin.rules.sampling import Bins
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.window import axes_of_last, with_window_sizes

aten = torch.ops.aten

Span = tuple[int, int]
#: Bins of an axis, the axis, its dimension, and the bins that a tile touches.
Line = tuple[Bins, int, int, Span]


def touched(bins: Bins, lo: int, hi: int) -> Span:
    """Bins ``o`` with ``floor(o n / m) < hi`` and ``ceil((o + 1) n / m) > lo``."""
    n, m = bins.size, bins.out
    return (lo * m) // n, -((-hi * m) // n)


def clipped(bins: Bins, o: int, lo: int, hi: int) -> Span:
    """The positions of a bin in ``[lo, hi)``, counted from ``lo``."""
    first, end = bins.bin(o)
    return max(lo, first) - lo, min(hi, end) - lo


def bin_members(bins: Bins, span: Span, lo: int, hi: int) -> Tensor:
    """Positions of each touched bin in ``[lo, hi)``, from ``lo`` on; shorter ones repeat their last."""
    ends = [clipped(bins, o, lo, hi) for o in range(*span)]
    most = max(end - first for first, end in ends)
    return torch.tensor([[min(first + i, end - 1) for i in range(most)] for first, end in ends])


@dataclass(frozen=True)
class Binned(Projection):
    """A reduction to bins: a tile adds to those that it touches."""

    bins: tuple[Bins, ...]
    axes: tuple[int, ...]

    def result_box(self, box: Box) -> Box:
        for b, a in zip(self.bins, self.axes, strict=True):
            box = box.replace(a, *touched(b, box.lo[a], box.hi[a]))
        return box


@dataclass(frozen=True)
class BinOp(ReduceOp):
    """A reduction of each bin, for the bins that a tile touches."""

    bins: tuple[Bins, ...]
    axes: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype

    def lines(self, box: Box) -> list[Line]:
        """Each pooled axis of a tile."""
        return [
            (b, a, d, touched(b, box.lo[a], box.hi[a])) for b, a, d in zip(self.bins, self.axes, self.dims, strict=True)
        ]


@dataclass(frozen=True)
class BinMean(BinOp):
    """Sums in float64, divided once at the end."""

    neutral: ClassVar[tuple[float, ...]] = (0.0,)

    def sums(self, box: Box, x: Tensor) -> Tensor:
        for b, a, d, span in self.lines(box):
            ends = [clipped(b, o, box.lo[a], box.hi[a]) for o in range(*span)]
            x = torch.cat([x.narrow(d, s, e - s).sum(d, keepdim=True) for s, e in ends], d)
        return x

    def counts(self, like: Tensor, spans: Sequence[Span]) -> Tensor:
        """Number of positions of each bin, shaped to divide the result."""
        total = torch.ones([1] * like.dim(), dtype=like.dtype, device=like.device)
        for b, d, span in zip(self.bins, self.dims, spans, strict=True):
            lengths = [end - first for first, end in map(b.bin, range(*span))]
            line = torch.tensor(lengths, dtype=like.dtype, device=like.device)
            total = total * line.view(-1, *[1] * (like.dim() - 1 - d))
        return total

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        return Reduction((self.sums(box, widen(tiles[0])).double(),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction((left.parts[0] + right.parts[0],))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (value,) = total.parts
        return ((value / self.counts(value, [(0, b.out) for b in self.bins])).to(self.dtype),)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        x = widen(tiles[0])
        return ((self.sums(box, x) / self.counts(x, [span for *_, span in self.lines(box)])).to(self.dtype),)


def row_maximum(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row of ``index`` along ``dim``, and which of the row it was."""
    found = x.index_select(dim, index.reshape(-1)).unflatten(dim, index.shape).max(dim + 1)
    return found.values, found.indices


def flat_positions(where: Tensor | None, choice: Tensor, index: Tensor, origin: int, dim: int, step: int) -> Tensor:
    """Flat positions after one more axis: of each choice, its position on this axis, and what was found before."""
    bins = torch.arange(len(index), device=index.device).view(-1, *[1] * (choice.dim() - 1 - dim))
    at = index[bins, choice]
    return at * step if where is None else at * step + where.gather(dim, at - origin)


@dataclass(frozen=True)
class BinMax(BinOp):
    """(largest value, its first flat position in the map), which takes the whole gradient."""

    neutral: ClassVar[tuple[float, ...]] = (-math.inf, math.inf)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = tiles[0]
        where: Tensor | None = None
        step = 1
        for b, a, d, span in reversed(self.lines(box)):
            index = bin_members(b, span, box.lo[a], box.hi[a]).to(x.device)
            x, choice = row_maximum(x, d, index)
            where = flat_positions(where, choice, index + box.lo[a], box.lo[a], d, step)
            step *= b.size
        assert where is not None
        return Reduction((x, where))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction(more_extreme(left.parts, right.parts, 1))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        """The tile's value at the position of each maximum, where that lies in the tile."""
        x, where = tiles[0], outputs[1]
        place, inside = to_tile_positions(where, box, self.axes, [b.size for b in self.bins])
        first = self.dims[0]  # those that are not pooled between it and the last are of size one
        found = x.flatten(first).gather(first, torch.where(inside, place, 0).flatten(first)).view_as(inside)
        return torch.where(inside, found, 0), None


@dataclass(frozen=True)
class AdaptiveMax(SeparableOp):
    """The largest value of each bin, or, with ``index``, its flat position among the pooled dimensions of the map."""

    kind: ClassVar[str] = "resample"
    maps: tuple[Bins, ...]
    dims: tuple[int, ...]
    index: bool = False

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """The bins, from the first input on; where they lie, if positions are asked for."""
        return (lo, hi) if self.index else super().mark(axis, lo, hi)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """The last axis first: of equal values in a bin, the first in row-major order wins, as PyTorch has it."""
        x = tiles[0]
        (held,) = self.need(box)
        where = None
        step = 1
        for sampler, a, d in reversed(list(zip(self.maps, self.axes, self.dims, strict=True))):
            index = sampler.members(box.lo[a], box.hi[a])[0]
            x, choice = row_maximum(x, d, (index - held.lo[a]).to(x.device))
            if self.index:
                where = flat_positions(where, choice, index.to(x.device), held.lo[a], d, step)
                step *= sampler.size
        return x if where is None else where


def record_adaptive(
    rec: Recorder, x: Value, size: Sequence[int], outs: Sequence[Tensor], maximum: bool, name: str
) -> Any:
    count = len(size)
    found = axes_of_last(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    if any(size[i] != 1 for i in range(count) if i not in used) or not all(size):
        return NotImplemented
    rank = len(x.shape)
    dims = tuple(rank - count + i for i in used)
    bins = tuple(Bins(x.shape[d], outs[0].shape[d]) for d in dims)
    layout = with_window_sizes(x, axes, outs[0].shape)
    if is_small(bins) and set(dims) == set(x.space.axis_dims):
        op = (BinMax if maximum else BinMean)(bins, axes, dims, outs[0].dtype)
        return rec.emit(Binned(op, layout, layout, op.neutral, bins, axes), [x], outs, None, name)
    if not maximum:
        return rec.emit(Resample(bins, axes, dims), [x], outs, layout, name)
    values = rec.emit(AdaptiveMax(bins, axes, dims), [x], outs[:1], layout, name)
    return *values, *rec.emit(AdaptiveMax(bins, axes, dims, True), [x], outs[1:], layout, f"{name} indices")


def is_small(bins: Sequence[Bins]) -> bool:
    """True if the whole result is no larger than what one of its bins reads."""
    return math.prod(b.out for b in bins) <= math.prod(b.size // b.out for b in bins)


@over_last_dims(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, kind="resample")
def adaptive_avg_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    return record_adaptive(rec, args[0], args[1], outs, False, operator_name(func).removeprefix("_"))


@over_last_dims(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, kind="reduce or resample")
def adaptive_max_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, size = args
    if all(s == 1 for s in size):
        rank = len(x.shape)
        return record_first(rec, x, tuple(range(rank - len(size), rank)), True, outs, operator_name(func))
    return record_adaptive(rec, x, size, outs, True, "adaptive_max_pool")
