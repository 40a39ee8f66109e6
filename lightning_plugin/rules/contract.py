"""Matrix products: local if positions are rows or columns of the result, a reduction if they are summed over.

Attention pooling is a reduction: weights (N, heads, positions) times features (N, positions, channels). So is a linear
layer on a flattened map, of whose weight each tile uses its own columns. For a (positions, positions) matrix, each tile
has its rows and reads the other operand whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Axis, Dim, Layout
from lightning_plugin.ops import ReduceOp, Reduction, merging_dtype
from lightning_plugin.private import operator_name
from lightning_plugin.rules.attention import attention_by_hand
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.reductions import Projection, widen
from lightning_plugin.rules.table import ATEN, Recorder
from lightning_plugin.rules.uncut import axes_under, uncut

aten = torch.ops.aten

#: Dimensions of both operands and of the result: b is the batch, i and j are rows and columns, k is summed over.
FORMS = {
    "mm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
}


@dataclass(frozen=True)
class Product(ReduceOp):
    """Sum over positions of a product of two maps. It is linear in each, so that `pull` is the product of a tile."""

    uniform: ClassVar[bool] = True
    form: str
    dtype: torch.dtype

    def need(self, box: Box) -> tuple[Box, ...]:
        return box, box

    def product(self, tiles: Sequence[Tensor]) -> Tensor:
        left, right = (widen(t) for t in tiles)
        return torch.bmm(left, right) if self.form == "bmm" else torch.matmul(left, right)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        share = self.product(tiles)
        return Reduction((share.to(merging_dtype(share.dtype)),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction((left.parts[0] + right.parts[0],))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (total.parts[0].to(self.dtype),)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (self.product(tiles).to(self.dtype),)


@ATEN.rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, kind="local or reduce")
def product(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    left, right = (without_single_axes(rec, v) for v in args)
    if not left.is_map and not right.is_map:
        return rec.vector(func, [left, right], {}, outs, name=operator_name(func))
    if operator_name(func) == "bmm" and (found := attention_by_hand(rec, left, right, outs[0])) is not NotImplemented:
        return found
    at, bt, _ = FORMS[operator_name(func)]
    for one, other in (
        (left, right),
        (left, uncut_operand(rec, right, bt)),
        (uncut_operand(rec, left, at), right),
        (uncut_operand(rec, left, at), uncut_operand(rec, right, bt)),
    ):
        found = record_product(rec, func, one, other, outs)
        if found is not NotImplemented:
            return found
    return NotImplemented


def uncut_operand(rec: Recorder, value: Value, letters: str) -> Value:
    """Return an operand that is uncut except along its batch."""
    return uncut(rec, value, axes_under(value, [d for d, letter in enumerate(letters) if letter != "b"]))


def record_product(rec: Recorder, func: Any, left: Value, right: Value, outs: Sequence[Tensor]) -> Any:
    """Record a product of operands, one of them a map, without changing their axes."""
    form = operator_name(func)
    at, bt, out = FORMS[form]
    if not left.is_map and not right.is_map:
        return NotImplemented
    if is_cut(left, at.index("k")) or is_cut(right, bt.index("k")):
        return sum_over_positions(rec, form, left, right, outs)
    return local_product(rec, func, left, right, outs, (at, bt, out))


def without_single_axes(rec: Recorder, value: Value) -> Value:
    """Return a map of one position as a vector."""
    return rec.gather(value) if value.is_map and all(size == 1 for size in value.space.extent) else value


def is_cut(value: Value, dim: int) -> bool:
    return value.is_map and value.space.normalized.has_axis(dim)


def sum_over_positions(rec: Recorder, form: str, left: Value, right: Value, outs: Sequence[Tensor]) -> Any:
    """Record a sum over positions, all or all of each image, if both operands have them in the same order."""
    at, bt, out = FORMS[form]
    first = left if left.is_map else right
    extent = first.space.extent
    names = at if first is left else bt
    shared = {n: first.space.normalized.dims[names.index(n)] for n in names if n in "bk"}
    shared = {n: dim for n, dim in shared.items() if any(isinstance(f, Axis) for f in dim)}
    operands = []
    for value, names in ((left, at), (right, bt)):
        if not value.is_map:
            dims = tuple(shared.get(n, (size,)) for n, size in zip(names, value.shape, strict=True))
            value = rec.spread(value, Layout(dims, extent))
        tidy = value.space.normalized
        mine = {n: tidy.dims[d] for d, n in enumerate(names) if tidy.has_axis(d)}
        if tidy.extent != extent or mine != shared:
            return NotImplemented
        operands.append(value)
    inner = Product(form, outs[0].dtype)
    if "b" not in shared:
        return rec.emit(inner, operands, outs, None, form)
    summed_over = {f.index for f in shared["k"] if isinstance(f, Axis)}
    left_over = tuple(1 if a in summed_over else size for a, size in enumerate(extent))
    dims = tuple(shared.get(n, (size,)) for n, size in zip(out, outs[0].shape, strict=True))
    result = Layout(dims, left_over)
    return rec.emit(Projection(inner, result, result, (0.0,)), operands, outs, None, form)


def local_product(
    rec: Recorder, func: Any, left: Value, right: Value, outs: Sequence[Tensor], names: tuple[str, str, str]
) -> Any:
    """Record a product as local: positions are its rows or columns, from one operand, or its batch."""
    dims: dict[str, Dim] = {}
    for value, letters in ((left, names[0]), (right, names[1])):
        for d, letter in enumerate(letters):
            if is_cut(value, d):
                dim = value.space.normalized.dims[d]
                if dims.setdefault(letter, dim) != dim:
                    return NotImplemented
    maps = [v for v in (left, right) if v.is_map]
    if len({len(v.space.extent) for v in maps}) != 1:
        return NotImplemented
    extent = tuple(map(max, *(v.space.extent for v in maps))) if len(maps) > 1 else maps[0].space.extent
    layout = Layout(tuple(dims.get(n, (size,)) for n, size in zip(names[2], outs[0].shape, strict=True)), extent)
    axes = [f.index for dim in layout.dims for f in dim if isinstance(f, Axis)]
    if sorted(axes) != [a for a, size in enumerate(extent) if size > 1] or layout.shape != tuple(outs[0].shape):
        return NotImplemented
    if any(size not in (1, full) for v in maps for size, full in zip(v.space.extent, extent, strict=True)):
        return NotImplemented
    name = operator_name(func)
    if len(maps) == 1 and "b" in dims:
        left, right = (v if v.is_map else matrix_per_position(rec, v, dims["b"], extent) for v in (left, right))
        func, name = torch.matmul, "matmul"
    return local(rec, func, [left, right], {}, outs[0], layout, name=name)


def matrix_per_position(rec: Recorder, value: Value, batch: Dim, extent: tuple[int, ...]) -> Value:
    """Return a batch of matrices, a vector, as a map; if it is one matrix expanded (a linear layer), that matrix."""
    if value.fake.stride(0) == 0:
        matrix = rec.fake(value.shape[1:], value.dtype, value.device)
        return rec.vector(aten.select.int, [value, 0, 0], {}, [matrix], name="select")[0]
    within = {f.index for f in batch if isinstance(f, Axis)}
    own = tuple(size if a in within else 1 for a, size in enumerate(extent))
    return rec.spread(value, Layout((batch, *((size,) for size in value.shape[1:])), own))


@ATEN.rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, kind="local or reduce")
def product_plus(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """beta · bias + alpha · (left @ right)."""
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv,
    }  # fmt: skip
    product = products[operator_name(func)]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)

    def added(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
        found = product(left, right) if alpha == 1 else product(left, right) * alpha
        if beta == 0:  # the bias is ignored, even NaN
            return found
        return (bias if beta == 1 else bias * beta) + found

    return rec.decompose(added, *args)
