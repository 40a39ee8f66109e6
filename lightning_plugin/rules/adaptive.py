"""Adaptive pooling to any size.

Bins of adaptive pooling differ in length and may overlap, so that no window slides. If the result is smaller than a bin
(seven by seven of a slide), it is a vector, to which each tile adds its part of the bins. A larger result is a map,
whose tiles read their bins.
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
from lightning_plugin.ops import ReduceOp, Reduction, SeparableOp, merging_dtype
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import over_last_dims
from lightning_plugin.rules.interpolate import Resample
from lightning_plugin.rules.reduce import record_first
from lightning_plugin.rules.reductions import Projection, more_extreme, to_tile_positions, widen
from lightning_plugin.rules.sampling import Sampler, on_real_tensors
from lightning_plugin.rules.table import Recorder
from lightning_plugin.rules.window import axes_of_last, with_window_sizes

aten = torch.ops.aten

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bins(Sampler):
    """Bins of one axis of n inputs and m outputs: bin ``o`` has inputs ``[floor(o n / m), ceil((o + 1) n / m))``."""

    def bin(self, o: int) -> Span:
        return (o * self.size) // self.out, -((-(o + 1) * self.size) // self.out)

    def need(self, lo: int, hi: int) -> Span:
        return self.bin(lo)[0], self.bin(hi - 1)[1]

    @on_real_tensors
    def taps(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        index, counts = self.members(lo, hi)
        inside = torch.arange(index.shape[1]) < counts.unsqueeze(1)
        return index, torch.where(inside, 1 / counts.unsqueeze(1).double(), 0.0)

    @on_real_tensors
    def members(self, lo: int, hi: int, among: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs of bins ``[lo, hi)``, shorter bins repeating their last one, and the number of each.

        Args:
            lo: First bin.
            hi: End of the bins.
            among: Interval of inputs that count; all by default.
        """
        at = torch.arange(lo, hi)
        first = (at * self.size).div(self.out, rounding_mode="floor")
        end = -(-(at + 1) * self.size).div(self.out, rounding_mode="floor")
        if among is not None:
            first, end = first.clamp(min=among[0]), end.clamp(max=among[1])
        index = first.unsqueeze(1) + torch.arange(int((end - first).max()))
        return torch.minimum(index, end.unsqueeze(1) - 1), end - first

    def touched(self, lo: int, hi: int) -> Span:
        """Return the interval of bins with an input in ``[lo, hi)``."""
        return (lo * self.out) // self.size, -((-hi * self.out) // self.size)


#: Bins of an axis, the axis, its dimension, and the bins with an input in the tile.
Line = tuple[Bins, int, int, Span]


@dataclass(frozen=True)
class Binned(Projection):
    """Reduction to bins; a tile adds to the bins with an input in it."""

    bins: tuple[Bins, ...]
    axes: tuple[int, ...]

    def result_box(self, box: Box) -> Box:
        for b, a in zip(self.bins, self.axes, strict=True):
            box = box.replace(a, *b.touched(box.lo[a], box.hi[a]))
        return box


@dataclass(frozen=True)
class BinOp(ReduceOp):
    """Reduction of each bin with an input in the tile.

    Attributes:
        bins: Bins of each axis.
        axes: The axes.
        dims: Dimension of each axis.
        dtype: Type of the result.
    """

    bins: tuple[Bins, ...]
    axes: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype

    def lines(self, box: Box) -> list[Line]:
        """Return bins, axis, dimension and touched bins, for each pooled axis of a tile."""
        return [
            (b, a, d, b.touched(box.lo[a], box.hi[a])) for b, a, d in zip(self.bins, self.axes, self.dims, strict=True)
        ]


@dataclass(frozen=True)
class BinMean(BinOp):
    """Mean of each bin: sums in float64, divided at the end."""

    neutral: ClassVar[tuple[float, ...]] = (0.0,)

    def sums(self, box: Box, x: Tensor) -> Tensor:
        for b, a, d, span in self.lines(box):
            lo, hi = box.lo[a], box.hi[a]
            ends = [(max(lo, first), min(hi, end)) for first, end in map(b.bin, range(*span))]
            x = torch.cat([x.narrow(d, first - lo, end - first).sum(d, keepdim=True) for first, end in ends], d)
        return x

    def counts(self, like: Tensor, spans: Sequence[Span]) -> Tensor:
        """Return the number of inputs of each bin, shaped to divide the result."""
        total = torch.ones([1] * like.dim(), dtype=like.dtype, device=like.device)
        for b, d, span in zip(self.bins, self.dims, spans, strict=True):
            lengths = [end - first for first, end in map(b.bin, range(*span))]
            line = torch.tensor(lengths, dtype=like.dtype, device=like.device)
            total = total * line.view(-1, *[1] * (like.dim() - 1 - d))
        return total

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        total = self.sums(box, widen(tiles[0]))
        return Reduction((total.to(merging_dtype(total.dtype)),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction((left.parts[0] + right.parts[0],))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (value,) = total.parts
        return ((value / self.counts(value, [(0, b.out) for b in self.bins])).to(self.dtype),)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        x = widen(tiles[0])
        return ((self.sums(box, x) / self.counts(x, [span for *_, span in self.lines(box)])).to(self.dtype),)


def row_maximum(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum over each row of indices along ``dim``, and its place in the row."""
    found = x.index_select(dim, index.reshape(-1)).unflatten(dim, index.shape).max(dim + 1)
    return found.values, found.indices


def flat_positions(where: Tensor | None, choice: Tensor, index: Tensor, origin: int, dim: int, step: int) -> Tensor:
    """Extend flat positions by one more axis.

    Args:
        where: Flat positions along the axes so far; None for the first axis.
        choice: Place of each maximum in its bin.
        index: Inputs of each bin.
        origin: First position of the tile on this axis.
        dim: Dimension of this axis.
        step: Number of positions along the axes so far.
    """
    bins = torch.arange(len(index), device=index.device).view(-1, *[1] * (choice.dim() - 1 - dim))
    at = index[bins, choice]
    return at * step if where is None else at * step + where.gather(dim, at - origin)


@dataclass(frozen=True)
class BinMax(BinOp):
    """Maximum of each bin and its first flat position in the map, which takes the whole gradient."""

    neutral: ClassVar[tuple[float, ...]] = (-math.inf, math.inf)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = tiles[0]
        where: Tensor | None = None
        step = 1
        for b, a, d, span in reversed(self.lines(box)):
            index = b.members(*span, among=(box.lo[a], box.hi[a]))[0].to(x.device)
            x, choice = row_maximum(x, d, index - box.lo[a])
            where = flat_positions(where, choice, index, box.lo[a], d, step)
            step *= b.size
        assert where is not None
        return Reduction((x, where))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction(more_extreme(left.parts, right.parts, 1))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        """Return the tile's value at the position of each maximum in the tile, else zero."""
        x, where = tiles[0], outputs[1]
        place, inside = to_tile_positions(where, box, self.axes, [b.size for b in self.bins])
        first = self.dims[0]  # those that are not pooled between it and the last are of size one
        found = x.flatten(first).gather(first, torch.where(inside, place, 0).flatten(first)).view_as(inside)
        return torch.where(inside, found, 0), None


@dataclass(frozen=True)
class AdaptiveMax(SeparableOp):
    """Maximum of each bin or, with ``index``, its flat position along the pooled dimensions of the map."""

    kind: ClassVar[str] = "resample"
    maps: tuple[Bins, ...]
    dims: tuple[int, ...]
    index: bool = False

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        """Bins relative to the first input; their positions with ``index``."""
        return (lo, hi) if self.index else super().mark(axis, lo, hi)

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Take the last axis first: of equal values in a bin, the first in row-major order wins, as in PyTorch."""
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
    """True if the result has at most as many positions as a bin."""
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
