"""Losses of dense predictions: the loss of each position is local, the sum or mean is a reduction.

Targets are maps without gradient: tensors with sizes along the axes, of which each tile takes its slice, or lazy
images. A mean with weights or an ignored class is the quotient of two sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.private import legacy_reduction
from lightning_plugin.rules.channels import arguments
from lightning_plugin.rules.pointwise import as_map, local, pointwise
from lightning_plugin.rules.reductions import Sum
from lightning_plugin.rules.table import API, ATEN, Recorder

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""Reductions, as aten numbers them."""


def reduce_all(rec: Recorder, value: Value, dtype: torch.dtype, divisor: float = 1.0) -> Value:
    """Record the sum of all elements of a map, divided by ``divisor``."""
    dims = tuple(range(len(value.shape)))
    op = Sum(dims, False, dtype, math.prod(value.shape), divisor)
    return rec.emit(op, [value], [rec.fake((), dtype, value.device)], None, "mean" if divisor != 1 else "sum")[0]


# Elementwise losses -----------------------------------------------------------------------------------------


@ATEN.rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    kind="local + reduce",
)
def elementwise_loss(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    given = arguments(func, args, kwargs)
    reduction = given["reduction"]
    full = list((given | {"reduction": NONE}).values())
    shape = torch.broadcast_shapes(given["self"].shape, given["target"].shape)
    dtype = outs[0].dtype if reduction == NONE else accumulation_dtype(outs[0].dtype)
    each = pointwise(rec, func, full, {}, [rec.fake(shape, outs[0].dtype, outs[0].device)])
    if reduction == NONE or each is NotImplemented:
        return each
    mean = reduce_all(rec, each, dtype, float(math.prod(shape)) if reduction == MEAN else 1.0)
    return cast_result(rec, mean, outs[0])


def cast_result(rec: Recorder, value: Value, out: Tensor) -> Value:
    """Cast a reduced value to the type that PyTorch returns."""
    if value.dtype == out.dtype:
        return value
    return rec.vector(aten._to_copy.default, [value], {"dtype": out.dtype}, [out], name="to")[0]


# Classes ----------------------------------------------------------------------------------------------------


@API.rule(F.cross_entropy, F.nll_loss, kind="local + reduce")
def class_loss(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Cross-entropy with class indices or probabilities, and negative log-likelihood with class indices."""
    a = arguments(func, args, kwargs)
    x, target, weight = a["input"], a["target"], a["weight"]
    reduction = a["reduction"]
    if a["size_average"] is not None or a["reduce"] is not None:
        reduction = legacy_reduction(a["size_average"], a["reduce"])
    channel = min(1, len(x.shape) - 1)
    if not x.is_map or x.space.normalized.has_axis(channel) or (weight is not None and weight.is_map):
        return NotImplemented
    layout = Layout((*x.space.dims[:channel], *x.space.dims[channel + 1 :]), x.space.extent)
    indices = not target.dtype.is_floating_point
    if not layout.dims:
        return NotImplemented
    wanted = layout if indices else x.space
    if target.shape != wanted.shape:
        return NotImplemented
    target = as_map(rec, target, wanted)
    how = {k: a[k] for k in ("ignore_index", "label_smoothing") if k in a}
    each = local(
        rec,
        func,
        [x, target, weight],
        {**how, "reduction": "none"},
        rec.fake(layout.shape, outs[0].dtype, x.device),
        layout,
        name=rec.name,
        autocast=rec.autocast,
    )
    if reduction == "none":
        return each
    dtype = accumulation_dtype(outs[0].dtype)
    if reduction == "sum":
        return cast_result(rec, reduce_all(rec, each, dtype), outs[0])
    if not indices:
        return cast_result(rec, reduce_all(rec, each, dtype, float(math.prod(layout.shape))), outs[0])
    mean = partial(mean_of_classes, ignore_index=a["ignore_index"], dtype=outs[0].dtype)
    return rec.decompose(mean, each, target, weight)


def mean_of_classes(
    loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of losses divided by the sum of weights, without ignored positions."""
    ignored = target == ignore_index
    if weight is None:
        weights = ignored.logical_not().sum()
    else:
        each = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
        weights = each.sum(dtype=accumulation_dtype(weight.dtype))
    return (loss.sum(dtype=accumulation_dtype(dtype)) / weights).to(dtype)


# Likelihoods ------------------------------------------------------------------------------------------------


def gaussian_nll_loss_on_fakes(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute PyTorch's loss without its check that variances are not negative, which needs data."""
    variance = torch.full_like(input, var) if isinstance(var, float) else var
    if variance.shape != input.shape and variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    # PyTorch clamps without grad: the difference is a constant.
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def gaussian_nll_loss(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Negative variances are refused when the variance has been computed, in the same pass over tiles."""
    variance = arguments(func, args, kwargs)["var"]
    if isinstance(variance, Value):
        negative = rec.decompose(any_negative, variance)
        if negative is NotImplemented:
            return NotImplemented
        rec.then(negative, refuse_negative)
    return rec.decompose(gaussian_nll_loss_on_fakes, *args, **kwargs)


API.rule(F.gaussian_nll_loss, kind="local + reduce", on_vectors=gaussian_nll_loss, stand_in=gaussian_nll_loss_on_fakes)(
    gaussian_nll_loss
)


def any_negative(variance: Tensor) -> Tensor:
    return (variance < 0).any()


def refuse_negative(_: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    if bool(found[0]):
        raise ValueError("gaussian_nll_loss: var has negative entries")
