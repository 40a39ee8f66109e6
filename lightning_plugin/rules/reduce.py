"""Rules of reductions: PyTorch's operators in terms of those in `reductions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.ops import Call, accumulation_dtype
from lightning_plugin.private import operator_name
from lightning_plugin.rules.axes import WholeAxes, whole_axes
from lightning_plugin.rules.channels import arguments, local_on_plain, reduced_dims
from lightning_plugin.rules.pointwise import zero_gradient
from lightning_plugin.rules.reductions import (
    TIES,
    ExpSum,
    Extreme,
    FirstExtreme,
    Sum,
    VarMean,
    covers_space,
    cut_space_axes,
    log_of_sum,
    record_reduction,
    reduced_layout,
    reduced_size,
    root_of_sum,
)
from lightning_plugin.rules.table import ATEN, Recorder, Rule, decomposed

aten = torch.ops.aten


def reduction(*functions: Any, kind: str = "local or reduce") -> Callable[[Rule], Rule]:
    """Register a rule for reductions that leave at most one axis of space, so that the result is a vector.

    Other reductions need no rule of their own: over plain dimensions they are local; if more axes are left, the result
    is a map, whose tiles read the reduced axes whole.
    """

    def add(rule: Rule) -> Rule:
        def reduce(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
            x = args[0]
            dims, keep = reduced_dims(func, args, kwargs)
            found = local_on_plain(rec, func, args, kwargs, outs, dims) if len(dims) < len(x.shape) else NotImplemented
            if found is not NotImplemented:
                return found
            if covers_space(x, dims):
                return rule(rec, func, args, kwargs, outs)
            layout, axes = reduced_layout(x, dims, keep), whole_axes(rec, x, dims)
            if len(cut_space_axes(rec, layout)) < 2:
                found = rule(rec, func, args, kwargs, outs)
            if found is not NotImplemented or axes is None or len(outs) > 1:
                return found
            _, new_args, new_kwargs = rec.template(args, kwargs)
            op = WholeAxes(Call(func, new_args, new_kwargs), x.space.extent, tuple(axes), layout)
            return rec.emit(op, [x], outs, layout, operator_name(func))

        ATEN.rule(*functions, kind=kind)(reduce)
        return rule

    return add


@reduction(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def total(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x = args[0]
    dims, keep = reduced_dims(func, args, kwargs)
    if kwargs.get("dtype") not in (None, x.dtype):  # cast, then reduce
        rest = {k: v for k, v in kwargs.items() if k != "dtype"}
        return rec.decompose(lambda x: func(x.to(kwargs["dtype"]), *args[1:], **rest), x)
    size = reduced_size(x, dims)
    op = Sum(dims, keep, outs[0].dtype, size, float(size) if operator_name(func) == "mean" else 1.0)
    return record_reduction(rec, op, x, outs, operator_name(func))


@reduction(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme_value(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Positions that tie share the gradient."""
    x, name = args[0], operator_name(func)
    dims, keep = reduced_dims(func, args, kwargs)
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    fakes = [*outs, rec.fake(shape, torch.int64, x.device), rec.fake([*shape, TIES], torch.int64, x.device)]
    op = Extreme(dims, keep, x.dtype, reduced_size(x, dims), x.space, 1 if "max" in name else -1)
    found = record_reduction(rec, op, x, fakes, name)
    return found if found is NotImplemented else found[:1]


@reduction(aten.max.dim, aten.min.dim)
def extreme_with_index(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Value and index; the first of equal ones takes the gradient."""
    return record_first(rec, args[0], *reduced_dims(func, args, kwargs), outs, operator_name(func))


def record_first(
    rec: Recorder, x: Value, dims: tuple[int, ...], keep: bool, outs: Sequence[Tensor], name: str
) -> Any:  # fmt: skip
    op = FirstExtreme(dims, keep, x.dtype, reduced_size(x, dims), x.space, -1 if name == "min" else 1)
    return record_reduction(rec, op, x, outs, name)


@reduction(aten.argmax.default, aten.argmin.default)
def first_index(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, name = args[0], operator_name(func)
    dims, keep = reduced_dims(func, args, kwargs)
    op = FirstExtreme(dims, keep, x.dtype, reduced_size(x, dims), x.space, 1 if name == "argmax" else -1)
    found = record_reduction(rec, op, x, [rec.fake(outs[0].shape, x.dtype, x.device), *outs], name, grad=False)
    return found if found is NotImplemented else found[1:]


@reduction(aten.logsumexp.default)
def logsumexp(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, out = args[0], outs[0]
    if x.dtype.is_complex:
        return NotImplemented
    dims, _ = reduced_dims(func, args, kwargs)
    dtype = accumulation_dtype(out.dtype)
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    op = ExpSum(dims, True, dtype, reduced_size(x, dims))
    found = record_reduction(rec, op, x, [rec.fake(shape, dtype, x.device) for _ in range(2)], "logsumexp")
    if found is NotImplemented:
        return NotImplemented
    return rec.vector(log_of_sum, [*found, list(out.shape), out.dtype], {}, outs, name="logsumexp")


@reduction(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def moments(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Variance and mean are one reduction. The variance of complex numbers is that of both their parts together."""
    x, name = args[0], operator_name(func)
    dims, keep = reduced_dims(func, args, kwargs)
    correction = kwargs.get("correction")
    if x.dtype.is_complex:

        def of_parts(x: Tensor) -> tuple[Tensor, ...]:
            real, imag = (part.var(dims, correction=correction, keepdim=keep) for part in (x.real, x.imag))
            var = real + imag
            spread = root_of_sum(var, 2, var.dtype) if name.startswith("std") else var
            return (spread, x.mean(dims, keep))[: len(outs)]

        return rec.decompose(of_parts, x)
    dtype = accumulation_dtype(x.dtype) if name == "std" else x.dtype
    op = VarMean(dims, keep, dtype, reduced_size(x, dims), 1 if correction is None else correction)
    found = record_reduction(rec, op, x, [rec.fake(outs[0].shape, dtype, x.device) for _ in range(2)], name)
    if len(outs) == 2 and (found is NotImplemented or name == "std_mean"):
        spread = aten.var.correction if name == "var_mean" else aten.std.correction
        return rec.decompose(lambda x: (spread(x, *args[1:], **kwargs), x.mean(dims, keep)), x)
    if name == "std" and found is not NotImplemented:
        return rec.vector(root_of_sum, [found[0], 2, outs[0].dtype], {}, outs, name="sqrt")
    return found if found is NotImplemented else found[: len(outs)]


@reduction(aten.linalg_vector_norm.default)
def norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Norms of order infinity, minus infinity and zero are decomposed; others are roots of sums of powers."""
    order = float(arguments(func, args, kwargs)["ord"])
    if order == 0 and rec.grad and args[0].requires_grad:  # it requires grad, and gives its input none
        count = rec.decompose(lambda x: x.ne(0).sum(*reduced_dims(func, args, kwargs)).to(outs[0].dtype), args[0])
        leaf = rec.session.capture(torch.zeros((), dtype=outs[0].dtype, device=args[0].device, requires_grad=True))
        return count if count is NotImplemented else zero_gradient(rec, leaf, count[0], outs[0])
    if math.isinf(order) or order == 0:
        return decomposed(rec, func, args, kwargs, outs)
    dims, keep = reduced_dims(func, args, kwargs)

    def powers(x: Tensor) -> Tensor:
        x = (x.abs() if x.is_complex() else x).to(accumulation_dtype(outs[0].dtype))
        power = x.square() if order == 2 else x.abs().pow(order)
        return root_of_sum(power.sum(dims, keepdim=keep), order, outs[0].dtype)

    return rec.decompose(powers, args[0]) if order > 0 else NotImplemented


@reduction(aten.any.dim, aten.any.dims, aten.any.default, aten.all.dim, aten.all.dims, aten.all.default)
def any_or_all(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Compare the number of true elements with one, or with all."""
    dims, keep = reduced_dims(func, args, kwargs)
    least = 1 if operator_name(func) == "any" else reduced_size(args[0], dims)
    return rec.decompose(lambda x: (x.ne(0).sum(dims, keep) >= least).to(outs[0].dtype), args[0])


@reduction(aten.prod.dim_int, kind="local")
def prod(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Over space it is a barrier: a product of that many factors overflows or underflows."""
    return NotImplemented


ATEN.rule(
    aten.aminmax.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum.default,
    kind="local or reduce",
)(decomposed)  # fmt: skip
