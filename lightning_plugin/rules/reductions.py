"""Reductions over space: operators that accumulate a result over tiles.

Forward merges partial results of tiles in a stable form, in float64. Backward differentiates plain sums in which the
final results are constants. For a mean μ and a variance v over n positions,

    forward    (n, μ, Σ(x-μ)²) merged pairwise            backward    Σ x / n     and    Σ (x-μ)² / n

have the same derivative: that of v through μ is Σ(x-μ)·(-2/n) = 0.

A reduction over *some* of the axes has results along the others: a tile adds to its slice of them (`Projection`).
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
from lightning_plugin.layout import Axis, Dim, Layout
from lightning_plugin.ops import ReduceOp, Reduction, accumulation_dtype, merging_dtype
from lightning_plugin.private import FakeTensor, first_order
from lightning_plugin.rules.noise import coordinates
from lightning_plugin.rules.table import Recorder

#: Number of positions that tie for an extreme value to be remembered; see [Note: ties].
TIES = 32


def widen(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


@dataclass(frozen=True)
class SpaceReduction(ReduceOp):
    """Reduction over dimensions that have all axes of its map; over some of the axes within a `Projection`.

    Attributes:
        dims: The dimensions.
        keep: The result keeps them, with size one.
        dtype: Type of the result.
        size: Number of elements that each result reduces.
    """

    dims: tuple[int, ...]
    keep: bool
    dtype: torch.dtype
    size: int

    @property
    def neutral(self) -> tuple[float, ...]:
        """Neutral value of each part of the accumulator."""
        return (0.0,)

    def with_reduced_last(self, x: Tensor) -> Tensor:
        """Return a tile with the reduced dimensions flattened to the last one."""
        dims = sorted(self.dims)
        return x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))


@dataclass(frozen=True)
class Sum(SpaceReduction):
    """Sum divided by ``divisor``: a mean, for instance."""

    uniform: ClassVar[bool] = True
    divisor: float = 1.0

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        total = widen(tiles[0]).sum(self.dims, keepdim=self.keep)
        return Reduction((total.to(merging_dtype(self.dtype)),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction((left.parts[0] + right.parts[0],))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        value = total.parts[0]
        return ((value / self.divisor if self.divisor != 1 else value).to(self.dtype),)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (widen(tiles[0]).sum(self.dims, keepdim=self.keep).to(self.dtype) / self.divisor,)


@dataclass(frozen=True)
class VarMean(SpaceReduction):
    """Variance, as `torch.var` with ``correction``, and mean of real numbers, by merged moments (Chan, Golub and
    LeVeque)."""

    uniform: ClassVar[bool] = True
    correction: float = 0.0

    @property
    def neutral(self) -> tuple[float, ...]:
        return 0.0, 0.0, 0.0

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = widen(tiles[0])
        var, mean = torch.var_mean(x, self.dims, correction=0, keepdim=self.keep)
        count = x.numel() / max(1, mean.numel())
        n = torch.full((), count, dtype=torch.float64, device=x.device)  # on the device, so that the ledger counts it
        return Reduction((n, mean.double(), var.double() * count))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        (n, mean, square), (m, other, squares) = left.parts, right.parts
        total = n + m
        delta = other - mean
        return Reduction((total, mean + delta * (m / total), square + squares + delta * delta * (n * m / total)))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _, mean, squares = total.parts
        var = squares / max(0.0, self.size - self.correction)  # without degrees of freedom inf or NaN, as in PyTorch
        return var.to(self.dtype), mean.to(self.dtype)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        square, total = Moments.apply(widen(tiles[0]), outputs[1], self)  # type: ignore[no-untyped-call]
        return square.to(self.dtype), total.to(self.dtype)


class Moments(torch.autograd.Function):
    """Σ (x-μ)² / (n-c) and Σ x / n of a tile, for their derivatives 2 (x-μ) / (n-c) and 1 / n.

    No operator reads their values, which are zeros. Both derivatives are added into one map.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, op: VarMean) -> tuple[Tensor, Tensor]:
        ctx.op = op
        ctx.save_for_backward(x, mean)
        ctx.set_materialize_grads(False)
        return x.new_zeros(mean.shape), x.new_zeros(mean.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, square: Tensor | None, total: Tensor | None) -> tuple[Tensor | None, None, None]:
        op: VarMean = ctx.op
        x, mean = ctx.saved_tensors
        found = None
        if square is not None:
            found = x - with_reduced_dims(mean.to(x.dtype), op)
            found *= with_reduced_dims(2 * square / (op.size - op.correction), op)
        if total is not None:
            share = with_reduced_dims(total / op.size, op)
            found = share.expand_as(x) if found is None else found.add_(share)
        return found, None, None


@dataclass(frozen=True)
class ExpSum(SpaceReduction):
    """Σ exp(x - m) and m = max x; the reduced dimensions are kept.

    The maximum only keeps numbers in range: it cancels, and is a constant in backward.
    """

    uniform: ClassVar[bool] = True

    @property
    def neutral(self) -> tuple[float, ...]:
        return 0.0, -math.inf

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = widen(tiles[0])
        top = x.amax(self.dims, keepdim=True)
        return Reduction(((x - finite_maximum(top)).exp_().sum(self.dims, keepdim=True).double(), top))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        (s, m), (t, n) = left.parts, right.parts
        top = torch.maximum(m, n)
        shift = finite_maximum(top)
        return Reduction((s * (m - shift).double().exp() + t * (n - shift).double().exp(), top))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts[0].to(self.dtype), total.parts[1].to(self.dtype)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (widen(tiles[0]) - finite_maximum(outputs[1])).exp().sum(self.dims, keepdim=True).to(self.dtype), None


def finite_maximum(top: Tensor) -> Tensor:
    """Return a maximum that can be subtracted: 0 in place of -inf."""
    return torch.where(top == -math.inf, 0.0, top)


def log_of_sum(total: Tensor, top: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return log Σ exp x from the results of `ExpSum`; an infinite one has no gradient, as in PyTorch."""
    return (total.masked_fill(top.isinf(), 1).log() + top).reshape(shape).to(dtype)


def root_of_sum(total: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the root of a sum; at zero its gradient is zero, as that of PyTorch's norms and standard deviations."""
    zero = total == 0
    return total.masked_fill(zero, 1).pow(1 / order).masked_fill(zero, 0).to(dtype)


def unsqueeze_dims(result: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a result with the reduced dimensions inserted as ones."""
    shape = list(result.shape)
    for d in sorted(dims):
        shape.insert(d, 1)
    return result.reshape(shape)


def with_reduced_dims(result: Tensor, op: SpaceReduction) -> Tensor:
    """Return an operator's result with the reduced dimensions inserted, if it has not kept them."""
    return result if op.keep else unsqueeze_dims(result, op.dims)


def flat_index(layout: Layout, dims: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Return the flat index, in the whole map along ``dims``, of each element of a tile.

    Indices ascend, since a tile keeps the order of the map.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for line in coordinates(Layout(tuple(layout.dims[d] for d in dims), layout.extent), box, device):
        index = index.unsqueeze(-1) + line
    return index.reshape(-1)


def locate(positions: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of positions in a tile, given its ascending positions, and a mask of those that are in it."""
    place = torch.searchsorted(positions, wanted.contiguous()).clamp_(max=len(positions) - 1)
    return place, positions[place] == wanted


def to_tile_positions(where: Tensor, box: Box, axes: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Convert flat positions in a map to flat positions in a tile; also return a mask of those in the tile.

    Args:
        where: The positions in the map.
        box: Box of the tile.
        axes: Axes along which positions are counted.
        sizes: Sizes of the map along them.
    """
    inside, place, step = torch.ones_like(where, dtype=torch.bool), torch.zeros_like(where), 1
    for a, size in reversed(list(zip(axes, sizes, strict=True))):
        at, held = where % size - box.lo[a], box.extent[a]
        where = where // size
        inside &= (at >= 0) & (at < held)
        place = place + at * step
        step *= held
    return place, inside


@dataclass(frozen=True)
class ExtremeOp(SpaceReduction):
    """Base of reductions to the largest or smallest value.

    Attributes:
        layout: Layout of the map.
        sign: 1 for the largest value, -1 for the smallest.
    """

    layout: Layout
    sign: int = 1

    def positions(self, box: Box, device: torch.device) -> Tensor:
        return flat_index(self.layout, sorted(self.dims), box, device)

    def extreme_per_row(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extreme value of each row, and a mask of the elements equal to it."""
        best = (x.amax if self.sign > 0 else x.amin)(-1, keepdim=True)
        return best, (x == best) | (x.isnan() & best.isnan())


@dataclass(frozen=True)
class Extreme(ExtremeOp):
    """Extreme value; positions that tie for it share its gradient, as those of `torch.amax`.

    [Note: ties] A tile that is computed again on another grid may differ from the first time in its last bits, and a
    comparison with the extreme value would find nothing. So forward remembers the positions that tie, up to `TIES`.
    If there are more (a constant background, say), or if one tile stands for identical ones, whose positions are not
    known, backward first runs its own tiles once more without grad, for the extreme and the number of ties that these
    tiles have: see `needs_backward_results`. In both cases the shares of all tiles add up to one.
    """

    uniform: ClassVar[bool] = True

    @property
    def neutral(self) -> tuple[float, ...]:
        return (-math.inf, 0.0, -1.0) if self.sign > 0 else (math.inf, 0.0, 0.0)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = self.with_reduced_last(tiles[0])
        best, match = self.extreme_per_row(x)
        ties = match.sum(-1)
        positions = self.positions(box, x.device)
        if x.device.type == "cpu" and not isinstance(ties, FakeTensor) and bool((ties == 1).all()):
            where = positions[match.to(torch.uint8).argmax(-1, keepdim=True)]
        else:
            first = match.to(torch.uint8).topk(min(TIES, x.shape[-1]))
            where = torch.where(first.values > 0, positions[first.indices], -1)
        where = torch.nn.functional.pad(where, (0, TIES - where.shape[-1]), value=-1)
        return Reduction(tuple(unsqueeze_dims(part, self.dims) for part in (best.squeeze(-1), ties, where)))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        (a, n, i), (b, m, j) = left.parts, right.parts
        best = torch.maximum(a, b) if self.sign > 0 else torch.minimum(a, b)
        ties = torch.where(a == best, n, 0) + torch.where(b == best, m, 0)
        both = [torch.where((v == best).unsqueeze(-1), at, -1) for v, at in ((a, i), (b, j))]
        return Reduction((best, ties, torch.cat(both, -1).topk(TIES).values))

    def repeat(self, part: Reduction, times: int) -> Reduction:
        """The positions of ties in identical tiles are not known; they are counted."""
        best, ties, where = part.parts
        return part if times == 1 else Reduction((best, ties * times, torch.full_like(where, -1)))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        best, ties, where = total.parts
        return best if self.keep else squeeze_dims(best, self.dims), ties, where

    def all_ties_known(self, ties: Tensor, where: Tensor) -> Tensor:
        """Return a mask of results whose ties all have known positions."""
        return (where >= 0).sum(-1) == ties

    @property
    def compares_results(self) -> bool:
        return True

    def needs_backward_results(self, outputs: Sequence[Tensor], shared: bool = False) -> bool:
        _, ties, where = outputs
        return shared or isinstance(ties, FakeTensor) or not bool(self.all_ties_known(ties, where).all())

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        best = squeeze_dims(outputs[0], self.dims) if self.keep else outputs[0]
        ties, where = (squeeze_dims(o, self.dims) for o in outputs[1:])
        x = self.with_reduced_last(tiles[0])
        place, mine = locate(self.positions(box, x.device), where)
        value = torch.where(mine, x.gather(-1, place), 0).sum(-1) / ties
        if self.needs_backward_results(outputs):
            equal = x == best.unsqueeze(-1)
            value = torch.where(
                self.all_ties_known(ties, where), value, (x * (equal.to(x.dtype) / ties.unsqueeze(-1))).sum(-1)
            )
        return unsqueeze_dims(value, self.dims) if self.keep else value, None, None


@dataclass(frozen=True)
class FirstExtreme(ExtremeOp):
    """Extreme value and its index: the first in row-major order among equals, which takes the whole gradient."""

    @property
    def neutral(self) -> tuple[float, ...]:
        return -self.sign * math.inf, math.inf

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        x = self.with_reduced_last(tiles[0])
        best, match = self.extreme_per_row(x)
        where = match.to(torch.uint8).argmax(-1)
        # An index without dimensions would be read as a number, which a tensor without data has not.
        found = best.squeeze(-1), self.positions(box, x.device).take(where)
        return Reduction(tuple(unsqueeze_dims(part, self.dims) if self.keep else part for part in found))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction(more_extreme(left.parts, right.parts, self.sign))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        x = self.with_reduced_last(tiles[0])
        where = squeeze_dims(outputs[1], self.dims) if self.keep else outputs[1]
        place, mine = locate(self.positions(box, x.device), where.unsqueeze(-1))
        value = torch.where(mine, x.gather(-1, place), 0).squeeze(-1)
        return unsqueeze_dims(value, self.dims) if self.keep else value, None


def more_extreme(left: Sequence[Tensor], right: Sequence[Tensor], sign: int) -> tuple[Tensor, ...]:
    """Merge two results of (value, position): take the more extreme value, NaN first, and the earlier of equal ones."""
    (a, i), (b, j) = left, right
    more = (b > a if sign > 0 else b < a) | (b.isnan() & ~a.isnan())
    take = more | (((b == a) | (b.isnan() & a.isnan())) & (j < i))
    return torch.where(take, b, a), torch.where(take, j, i)


def squeeze_dims(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.squeeze(d)
    return x


def covers_space(value: Value, dims: Sequence[int]) -> bool:
    """True if these dimensions have all axes of a map."""
    return all(d in dims for d in value.space.normalized.axis_dims)


def reduced_size(value: Value, dims: Sequence[int]) -> int:
    return math.prod(value.shape[d] for d in dims)


@dataclass(frozen=True)
class Nothing(ReduceOp):
    """Vector without elements, for empty results: its gradient is one of zeros, in all of the map."""

    uniform: ClassVar[bool] = True

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        return Reduction((tiles[0].new_empty(0),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return left

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return total.parts

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (tiles[0].flatten()[:0],)


def nothing(rec: Recorder, inputs: Sequence[Value], out: Tensor) -> Value:
    """Record an empty result, a vector: inputs that require grad get gradients of zeros."""

    def of_map(v: Value) -> Value:
        return rec.emit(Nothing(), [v], [rec.fake((0,), v.dtype, v.device)], None, "nothing")[0]

    parts = [of_map(v) if v.is_map else v for v in inputs if rec.grad and v.requires_grad]
    how = {"shape": list(out.shape), "dtype": out.dtype, "device": out.device}
    return rec.vector(empty_of, [parts], how, [out], name="nothing")[0]


def empty_of(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor that has the gradients of tensors."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return torch.cat([empty, *(t.flatten()[:0].to(dtype) for t in parts)]).reshape(shape)


# Reductions over some of the axes ------------------------------------------------------------------------


@dataclass(frozen=True)
class PartialSlices(Reduction):
    """Partial results on a box of the result's axes."""

    box: Box


@dataclass(frozen=True)
class Projection(ReduceOp):
    """Reduction over some of the axes; a tile adds to its slice of the result.

    Attributes:
        inner: Reduction of a tile.
        result: Layout of the result, whose reduced axes have extent one.
        kept: Layout of parts that keep the reduced dimensions, whether or not the result does.
        neutral: Neutral value of each part.
    """

    inner: ReduceOp
    result: Layout
    kept: Layout
    neutral: tuple[float, ...]

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.inner.uniform

    def need(self, box: Box) -> tuple[Box, ...]:
        return self.inner.need(box)

    def result_slice(self, box: Box) -> Hashable:
        return self.result_box(box)

    def repeat(self, part: Reduction, times: int) -> Reduction:
        assert isinstance(part, PartialSlices)
        return PartialSlices(self.inner.repeat(Reduction(part.parts), times).parts, part.box)

    def result_box(self, box: Box) -> Box:
        """Return the box of the result that a tile on an input box adds to."""
        return box.broadcast(self.result.extent)

    def layouts(self, parts: Sequence[Tensor]) -> list[Layout]:
        """Return the layout of each part: `kept` for parts that keep the reduced dimensions, with one more dimension
        behind them if they have it (positions of ties), else `result`."""
        kept = len(self.kept.dims)
        return [
            self.result
            if p.dim() < kept
            else self.kept
            if p.dim() == kept
            else Layout((*self.kept.dims, (p.shape[-1],)), self.kept.extent)
            for p in parts
        ]

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        parts = self.inner.partial(box, tiles, vectors).parts
        parts = tuple(p.expand(parts[-1].shape) if p.dim() == 0 else p for p in parts)
        return PartialSlices(parts, self.result_box(box))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        assert isinstance(left, PartialSlices) and isinstance(right, PartialSlices)
        total = self.extend(left)
        layouts = self.layouts(total.parts)
        old = [lay.narrow(p, total.box, right.box) for lay, p in zip(layouts, total.parts, strict=True)]
        new = self.inner.merge(Reduction(tuple(old)), right).parts
        for lay, part, value in zip(layouts, total.parts, new, strict=True):
            lay.write_into(part, total.box, value, right.box)
        return total

    def extend(self, part: PartialSlices) -> PartialSlices:
        """Extend a partial result to the whole box of the result, with neutral values elsewhere."""
        full = Box.whole(self.result.extent)
        if part.box == full and all(p.is_contiguous() for p in part.parts):
            return part
        parts = []
        for lay, p, neutral in zip(self.layouts(part.parts), part.parts, self.neutral, strict=True):
            if math.isinf(neutral) and not p.is_floating_point():
                neutral = torch.iinfo(p.dtype).max if neutral > 0 else torch.iinfo(p.dtype).min
            running = torch.full(lay.shape, neutral, dtype=p.dtype, device=p.device)
            lay.write_into(running, full, p, part.box)
            parts.append(running)
        return PartialSlices(tuple(parts), full)

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert isinstance(total, PartialSlices)
        return self.inner.finish(self.extend(total), vectors)

    @property
    def compares_results(self) -> bool:
        return self.inner.compares_results

    def needs_backward_results(self, outputs: Sequence[Tensor], shared: bool) -> bool:
        return self.inner.needs_backward_results(outputs, shared)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        full, mine = Box.whole(self.result.extent), self.result_box(box)
        layouts = self.layouts(outputs)
        here = [lay.narrow(o, full, mine) for lay, o in zip(layouts, outputs, strict=True)]
        pulls = self.inner.pull(box, tiles, vectors, here)
        return tuple(None if p is None else Embed.apply(p, lay, mine) for p, lay in zip(pulls, layouts, strict=True))


class Embed(torch.autograd.Function):
    """Whole result of which a tile computes a slice, for its derivative; no operator reads its values."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout, box: Box) -> Tensor:
        ctx.layout, ctx.box = layout, box
        return part.new_zeros(()).expand(layout.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.layout.narrow(grad, Box.whole(ctx.layout.extent), ctx.box), None, None


def reduced_layout(value: Value, dims: Sequence[int], keep: bool) -> Layout:
    """Return the layout after a reduction of ``dims``; their axes have extent one and move to the first dimension."""
    gone = {f.index for d in dims for f in value.space.dims[d] if isinstance(f, Axis)}
    extent = tuple(1 if a in gone else size for a, size in enumerate(value.space.extent))
    left: list[Dim] = [(1,) if d in dims else dim for d, dim in enumerate(value.space.dims) if keep or d not in dims]
    left[0] = (*(Axis(a) for a in sorted(gone)), *left[0])
    return Layout(tuple(left), extent)


def project(inner: SpaceReduction, x: Value) -> Projection:
    """Return the operator of a reduction whose dimensions have some of the map's axes."""
    return Projection(
        inner, reduced_layout(x, inner.dims, inner.keep), reduced_layout(x, inner.dims, True), inner.neutral
    )


def record_reduction(
    rec: Recorder, op: SpaceReduction, x: Value, fakes: Sequence[Tensor], name: str, grad: bool = True
) -> Any:
    """Record a reduction; decline if more than one axis of space is left, since its result should be a map then."""
    if covers_space(x, op.dims):
        return rec.emit(op, [x], fakes, None, name, grad=grad)
    projection = project(op, x)
    if len(cut_space_axes(rec, projection.result)) > 1:
        return NotImplemented
    return rec.emit(projection, [x], fakes, None, name, grad=grad)


def cut_space_axes(rec: Recorder, layout: Layout) -> list[int]:
    """Return the axes of space with more than one position; images are not space."""
    return [a for a, size in enumerate(layout.extent) if size > 1 and a not in rec.session.instance_axes]
