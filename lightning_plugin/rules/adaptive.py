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
from lightning_plugin.ops import Along, ReduceOp, Reduction
from lightning_plugin.rules.channels import name_of
from lightning_plugin.rules.interpolate import Resample
from lightning_plugin.rules.reductions import widen
from lightning_plugin.rules.sampling import Bins
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.window import squeezed_axes, windowed_at

aten = torch.ops.aten

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pooled:
    """Bins of each pooled axis, and its dimension."""

    bins: tuple[Bins, ...]
    axes: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype

    def touched(self, box: Box) -> Spans:
        """The bins of each axis that have positions in a box."""
        return tuple(touched(b, box.lo[a], box.hi[a]) for b, a in zip(self.bins, self.axes, strict=True))

    def shape(self, like: Tensor) -> list[int]:
        shape = list(like.shape)
        for b, d in zip(self.bins, self.dims, strict=True):
            shape[d] = b.out
        return shape

    def narrow(self, whole: Tensor, spans: Spans) -> Tensor:
        for (lo, hi), d in zip(spans, self.dims, strict=True):
            whole = whole.narrow(d, lo, hi - lo)
        return whole


def touched(bins: Bins, lo: int, hi: int) -> tuple[int, int]:
    """Bins ``o`` with ``floor(o n / m) < hi`` and ``ceil((o + 1) n / m) > lo``."""
    n, m = bins.size, bins.out
    return (lo * m) // n, -((-hi * m) // n)


def members(bins: Bins, span: tuple[int, int], lo: int, hi: int) -> Tensor:
    """Positions of each touched bin in ``[lo, hi)``, from ``lo`` on; shorter ones repeat their last."""
    ends = [clipped(bins, o, lo, hi) for o in range(*span)]
    most = max(end - first for first, end in ends)
    return torch.tensor([[min(first + i, end - 1) for i in range(most)] for first, end in ends])


def clipped(bins: Bins, o: int, lo: int, hi: int) -> tuple[int, int]:
    """The positions of a bin in ``[lo, hi)``, counted from ``lo``."""
    first, end = bins.bin(o)
    return max(lo, first) - lo, min(hi, end) - lo


class Place(torch.autograd.Function):
    """Touched bins in their place of the whole result, as far as a derivative goes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, pooled: Pooled, spans: Spans) -> Tensor:
        ctx.pooled, ctx.spans = pooled, spans
        return part.new_zeros(()).expand(pooled.shape(part))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.pooled.narrow(grad, ctx.spans), None, None


@dataclass(frozen=True)
class Part(Reduction):
    """Partial results of the bins in ``spans``; None when they are those of all bins."""

    spans: Spans | None = None


@dataclass(frozen=True)
class Binned(ReduceOp):
    """``blank`` is what a bin holds before anything was added to it."""

    pooled: Pooled

    def need(self, box: Box) -> tuple[Box, ...]:
        return (box,)

    def blank(self, part: Part) -> list[Tensor]:
        raise NotImplementedError

    def join(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        raise NotImplementedError

    def whole(self, part: Reduction) -> Part:
        assert isinstance(part, Part)
        return part if part.spans is None else self.merge(Part(tuple(self.blank(part))), part)

    def merge(self, left: Reduction, right: Reduction) -> Part:
        total = self.whole(left)
        assert isinstance(right, Part) and right.spans is not None
        views = [self.pooled.narrow(p, right.spans) for p in total.parts]
        for view, value in zip(views, self.join(views, right.parts), strict=True):
            view.copy_(value)
        return total


@dataclass(frozen=True)
class BinMean(Binned):
    """Sums in float64, divided once at the end."""

    def sums(self, box: Box, x: Tensor) -> Tensor:
        for b, a, d, span in zip(
            self.pooled.bins, self.pooled.axes, self.pooled.dims, self.pooled.touched(box), strict=True
        ):
            ends = [clipped(b, o, box.lo[a], box.hi[a]) for o in range(*span)]
            x = torch.cat([x.narrow(d, s, e - s).sum(d, keepdim=True) for s, e in ends], d)
        return x

    def counts(self, like: Tensor) -> Tensor:
        """Number of positions of each bin, shaped to divide the result."""
        total = torch.ones([1] * like.dim(), dtype=like.dtype, device=like.device)
        for b, d in zip(self.pooled.bins, self.pooled.dims, strict=True):
            lengths = [end - first for first, end in map(b.bin, range(b.out))]
            line = torch.tensor(lengths, dtype=like.dtype, device=like.device)
            total = total * line.view(-1, *[1] * (like.dim() - 1 - d))
        return total

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Part:
        return Part((self.sums(box, widen(tiles[0])).double(),), self.pooled.touched(box))

    def blank(self, part: Part) -> list[Tensor]:
        return [part.parts[0].new_zeros(self.pooled.shape(part.parts[0]))]

    def join(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        return [old[0] + new[0]]

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (value,) = self.whole(total).parts
        return ((value / self.counts(value)).to(self.pooled.dtype),)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        x, spans = widen(tiles[0]), self.pooled.touched(box)
        mean = self.sums(box, x) / self.pooled.narrow(self.counts(x), spans)
        return (Place.apply(mean.to(self.pooled.dtype), self.pooled, spans),)


def largest(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row of ``index`` along ``dim``, and which of the row it was."""
    found = x.index_select(dim, index.reshape(-1)).unflatten(dim, index.shape).max(dim + 1)
    return found.values, found.indices


def follow(where: Tensor | None, choice: Tensor, index: Tensor, origin: int, dim: int, step: int) -> Tensor:
    """Flat positions after one more axis: of each choice, its position on this axis, and what was found before."""
    bins = torch.arange(len(index), device=index.device).view(-1, *[1] * (choice.dim() - 1 - dim))
    at = index[bins, choice]
    return at * step if where is None else at * step + where.gather(dim, at - origin)


@dataclass(frozen=True)
class BinMax(Binned):
    """(largest value, its first flat position in the map), which takes the whole gradient."""

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Part:
        x, spans = tiles[0], self.pooled.touched(box)
        where: Tensor | None = None
        step = 1
        lines = list(zip(self.pooled.bins, self.pooled.axes, self.pooled.dims, spans, strict=True))
        for b, a, d, span in reversed(lines):
            index = members(b, span, box.lo[a], box.hi[a]).to(x.device)
            x, choice = largest(x, d, index)
            where = follow(where, choice, index + box.lo[a], box.lo[a], d, step)
            step *= b.size
        assert where is not None
        return Part((x, where), spans)

    def blank(self, part: Part) -> list[Tensor]:
        value, where = part.parts
        lowest = -math.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
        shape = self.pooled.shape(value)
        return [value.new_full(shape, lowest), where.new_full(shape, torch.iinfo(torch.int64).max)]

    def join(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        (a, i), (b, j) = old, new
        take = (b > a) | ((b == a) & (j < i)) | (b.isnan() & ~a.isnan())
        return [torch.where(take, b, a), torch.where(take, j, i)]

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.whole(total).parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        """The tile's value at the position of each maximum, where that lies in the tile."""
        x, spans = tiles[0], self.pooled.touched(box)
        where = self.pooled.narrow(outputs[1], spans)
        inside = torch.ones_like(where, dtype=torch.bool)
        local, step = torch.zeros_like(where), 1
        for b, a in reversed(list(zip(self.pooled.bins, self.pooled.axes, strict=True))):
            at = where % b.size - box.lo[a]
            inside &= (at >= 0) & (at < box.hi[a] - box.lo[a])
            local = local + at * step
            where = where // b.size
            step *= box.hi[a] - box.lo[a]
        order = (*(d for d in range(x.dim()) if d not in self.pooled.dims), *self.pooled.dims)
        count = len(self.pooled.dims)
        place = torch.where(inside, local, 0).permute(order).flatten(-count)
        found = x.permute(order).flatten(-count).gather(-1, place).unflatten(-1, [hi - lo for lo, hi in spans])
        found = found.permute([order.index(d) for d in range(x.dim())])
        return Place.apply(torch.where(inside, found, 0), self.pooled, spans), None


@dataclass(frozen=True)
class AdaptiveMax(Along):
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
            x, choice = largest(x, d, (index - held.lo[a]).to(x.device))
            if self.index:
                where = follow(where, choice, index.to(x.device), held.lo[a], d, step)
                step *= sampler.size
        return x if where is None else where


def adaptive(rec: Recorder, x: Value, size: Sequence[int], outs: Sequence[Tensor], maximum: bool, name: str) -> Any:
    count = len(size)
    found = squeezed_axes(x, count)
    if found is None:
        return NotImplemented
    axes, used = found
    if any(size[i] != 1 for i in range(count) if i not in used) or not all(size):
        return NotImplemented
    rank = len(x.shape)
    dims = tuple(rank - count + i for i in used)
    bins = tuple(Bins(x.shape[d], outs[0].shape[d]) for d in dims)
    if small(bins) and set(dims) == set(x.space.space):
        pooled = Pooled(bins, axes, dims, outs[0].dtype)
        return rec.emit((BinMax if maximum else BinMean)(pooled), [x], outs, None, name)
    layout = windowed_at(x, used, count, outs[0].shape)
    if not maximum:
        return rec.emit(Resample(bins, axes, dims), [x], outs, layout, name)
    values = rec.emit(AdaptiveMax(bins, axes, dims), [x], outs[:1], layout, name)
    return *values, *rec.emit(AdaptiveMax(bins, axes, dims, True), [x], outs[1:], layout, f"{name} indices")


def small(bins: Sequence[Bins]) -> bool:
    """True if the whole result is no larger than what one of its bins reads."""
    return math.prod(b.out for b in bins) <= math.prod(b.size // b.out for b in bins)


@ATEN.rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, kind="resample")
def adaptive_avg_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    return adaptive(rec, args[0], args[1], outs, False, name_of(func).removeprefix("_"))


@ATEN.rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """To more than one position."""
    x, size = args
    return NotImplemented if all(s == 1 for s in size) else adaptive(rec, x, size, outs, True, "adaptive_max_pool")
