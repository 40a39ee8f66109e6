"""Normalisation layers: a reduction to statistics, and an operator that applies them.

    y = (x - μ) / sqrt(v + ε) · w + b

A training-mode BatchNorm is a `VarMean` over batch and space and a `Normalize`; GroupNorm, InstanceNorm and a LayerNorm
over space are the same on a map whose batch and channels are regrouped. With given statistics (eval mode), or
statistics over plain dimensions only, the layer is local: PyTorch's own kernel runs on each tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import CHANNELS_LAST, Layout, plain_strides
from lightning_plugin.ops import TileOp, accumulation_dtype
from lightning_plugin.private import first_order, uncounted_writes
from lightning_plugin.rules.channels import arguments, is_plain
from lightning_plugin.rules.pointwise import local, pointwise
from lightning_plugin.rules.reductions import VarMean, covers_space, record_reduction, reduced_layout
from lightning_plugin.rules.table import API, Recorder
from lightning_plugin.rules.views import reshape_map

aten = torch.ops.aten


class Normalization(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` on channel dimension 1, by PyTorch's own kernels.

    The kernel's backward gives Σ g·x̂ and Σ g for each channel, and the gradients of mean and variance follow from
    these, so that x is the only map saved for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps, ctx.bias = eps, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        mean, var, scale, shift = in_accumulation_dtype(x, mean, var, weight, bias)
        return torch.batch_norm(x, scale, shift, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None, None
        x, exact_mean, exact_var, weight = ctx.saved_tensors
        exact = exact_mean.dtype
        mean, var, unit = in_accumulation_dtype(x, exact_mean, exact_var, weight)
        # Without a weight the kernel skips Σ g·x̂, which the variance needs.
        unit = torch.ones_like(mean) if unit is None else unit
        rstd = (exact_var + ctx.eps).rsqrt()
        grad = plain_strides(grad if grad.is_contiguous(memory_format=torch.channels_last) else grad.contiguous())
        if x.device.type == "cpu" and is_channels_last(x):
            dx, scaled, total = channels_last_backward(grad, x, unit, mean, rstd.to(mean.dtype))
        else:
            # Saved statistics of a forward in eval mode: empty tensors for CUDA's kernel, None for the CPU's.
            # CUDA's sums are wrong if the input's gradient is not asked for (seen in 2.11).
            cuda = x.device.type == "cuda"
            saved = mean.new_empty(0) if cuda else None
            wanted = [ctx.needs_input_grad[0] or cuda, True, True]
            dx, scaled, total = aten.native_batch_norm_backward(
                grad, x, unit, mean, var, saved, saved, False, ctx.eps, wanted
            )
        # The sum of the map's direct gradient, with its sign turned; see `statistics_dtype`.
        d_mean = -unit.to(exact) * rstd * total if dx is None else -channel_sums(dx).to(exact)  # type: ignore[redundant-expr]
        d_var = -0.5 * unit.to(exact) * rstd.square() * scaled
        return (
            dx,
            d_mean,
            d_var,
            None if weight is None else scaled.to(weight.dtype),
            None if ctx.bias is None else total.to(ctx.bias),
            None,
        )


def in_accumulation_dtype(x: Tensor, *vectors: Tensor | None) -> list[Any]:
    """Cast vectors to the type of sums over the map, which PyTorch's kernels expect."""
    return [None if v is None else v.to(accumulation_dtype(x.dtype)) for v in vectors]


def with_layout_of_input(grad: Tensor | None, last: bool) -> Tensor | None:
    """Make a gradient contiguous, with channels last if ``last``, and with the strides that PyTorch would give it; a
    pass may reach the result without one."""
    if grad is None:
        return None
    if last and grad.dim() in CHANNELS_LAST:
        return plain_strides(grad.contiguous(memory_format=CHANNELS_LAST[grad.dim()]))
    return plain_strides(grad.contiguous())


def register_layout_hook(out: Tensor, last: bool) -> Tensor:
    """Hook the result of a BatchNorm, so that its gradient gets the memory format of the input.

    PyTorch's kernel on a CPU computes wrong gradients from a gradient of one image whose strides look like channels
    last, such as a transposed bag's (2.13; tests/lightning_plugin/test_batch_norm.py).
    """
    if out.requires_grad and out.device.type == "cpu":
        out.register_hook(partial(with_layout_of_input, last=last))
    return out


#: Length of blocks that `channel_sums` sums first: a power of two, so that equal numbers are summed without rounding.
BLOCK = 64


def channel_sums(x: Tensor) -> Tensor:
    """Return each channel's sum in float64; on a CPU, where that takes a copy of the map, of the sums of blocks."""
    dims = [d for d in range(x.dim()) if d != 1]
    if x.device.type == "cuda":
        return x.sum(dims, dtype=torch.float64)
    if not x.is_contiguous() or x.device.type == "mps":
        return x.sum(dims, dtype=accumulation_dtype(x.dtype))
    flat = x.reshape(*x.shape[:2], -1)
    whole = flat.shape[2] // BLOCK * BLOCK
    blocks = flat[..., :whole].unflatten(2, (-1, BLOCK)).sum(3, dtype=accumulation_dtype(x.dtype))
    total = blocks.sum((0, 2), dtype=torch.float64)
    return total if whole == flat.shape[2] else total + flat[..., whole:].sum((0, 2), dtype=torch.float64)


def is_channels_last(x: Tensor) -> bool:
    """True if a tensor is contiguous in channels-last order and in no other."""
    order = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return not x.is_contiguous() and x.is_contiguous(memory_format=order)


def channels_last_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ∂x, Σ g·x̂ and Σ g of a BatchNorm on channels-last tensors.

    PyTorch's kernel for this order on a CPU adds positions one by one in the type of ``x``, with an error that grows
    with the tile. `torch.sum` adds in pairs.
    """
    line = [1, -1, *[1] * (x.dim() - 2)]
    dims = [d for d in range(x.dim()) if d != 1]
    wide_grad = grad.to(mean.dtype)
    dx = (wide_grad * (weight * rstd).view(line)).to(x.dtype)
    scaled = (x - mean.view(line)).mul_(wide_grad).sum(dims) * rstd
    return dx, scaled, wide_grad.sum(dims)


@dataclass(frozen=True)
class Normalize(TileOp):
    """Normalise by statistics, and scale and shift.

    Attributes:
        eps: Added to the variance.
        weight: There is a weight.
        bias: There is a bias.
        fold: Number of neighbouring channels that share their statistics, with batch and channels folded into one
            dimension, as in GroupNorm; 0 for a BatchNorm.
        among: Extent of the statistics, if they are maps along the axes of images, else empty.
    """

    kind: ClassVar[str] = "broadcast"
    uniform: ClassVar[bool] = True
    eps: float
    weight: bool
    bias: bool
    fold: int = 0
    among: tuple[int, ...] = ()

    def need(self, box: Box) -> tuple[Box, ...]:
        if not self.among:
            return (box,)
        images = box.broadcast(self.among)
        return box, images, images

    def mark(self, axis: int, lo: int, hi: int) -> Hashable:
        return None

    @property
    def returns_view(self) -> bool:
        return self.fold > 0

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        mean, var, *rest = [*tiles[1:], *vectors]
        if self.fold:
            mean, var = (t.reshape(-1).repeat_interleave(self.fold) for t in (mean, var))
            rest = [v.repeat(x.shape[0]) for v in rest]
        weight = rest.pop(0) if self.weight else None
        bias = rest.pop(0) if self.bias else None
        flat = plain_strides(x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:]) if self.fold else x)
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)
        out: Tensor = Normalization.apply(flat, mean, var, weight, bias, self.eps)
        # No view without need: autograd copies for an operator in place on a view.
        return out.reshape(x.shape) if self.fold else out


def statistics_dtype(x: Value) -> torch.dtype:
    """Return the type of statistics: float64 for a map in float32.

    The gradient of the map directly and that by its mean cancel (to zero, if a mean follows the normalisation).
    PyTorch's kernel subtracts them position by position; here each is summed over tiles by itself, and a rounding error
    of the mean's gradient would shift the gradient of every position.
    """
    return torch.float64 if x.dtype == torch.float32 and x.device.type != "mps" else accumulation_dtype(x.dtype)


def statistics(rec: Recorder, x: Value, dims: Sequence[int], shape: Sequence[int]) -> tuple[Value, Value, int]:
    """Record mean and biased variance over dimensions with all of space; also return the number of elements of each."""
    size = math.prod(x.shape[d] for d in dims)
    dtype = statistics_dtype(x)
    fakes = [rec.fake(shape, dtype, x.device) for _ in range(2)]
    var, mean = record_reduction(rec, VarMean(tuple(dims), False, dtype, size), x, fakes, "statistics")
    return mean, var, size


def normalize(
    rec: Recorder,
    x: Value,
    mean: Value,
    var: Value,
    weight: Value | None,
    bias: Value | None,
    eps: float,
    out: Tensor,
    fold: int = 0,
) -> Value:
    among = mean.space.extent if mean.is_map else ()
    op = Normalize(eps, weight is not None, bias is not None, fold, among)
    inputs = [v for v in (x, mean, var, weight, bias) if v is not None]
    # Inputs have their meaning by position: a tensor that is used twice is an input twice.
    return rec.emit(op, inputs, [out], x.space, "normalize")[0]


def record_running_statistics(
    rec: Recorder, a: dict[str, Any], mean: Value, var: Value, size: int, momentum: float
) -> None:
    """Have running statistics updated when the batch's are known; the variance is the unbiased one."""
    targets = a["running_mean"], a["running_var"]
    if targets[0] is not None:
        how = partial(channel_statistics, channels=targets[0].shape[0], size=size)
        record_update_of_running(rec, targets, [mean, var], momentum, how)


def channel_statistics(found: Sequence[Tensor], channels: int, size: int) -> list[Tensor]:
    """Return mean and unbiased variance of each channel: the mean over images."""
    mean, var = (t.view(-1, channels).mean(0) for t in found)
    return [mean, var * (size / max(1, size - 1))]


def batch_norm_eval(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise by given statistics, as `F.batch_norm` does after its checks."""
    x = plain_strides(x)
    out = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)
    return register_layout_hook(out, is_channels_last(x))


def record_batch_norm_eval(rec: Recorder, arguments: Sequence[Any], out: Tensor, name: str) -> Value:
    """Record a normalisation by given statistics, which is local."""
    return local(rec, batch_norm_eval, arguments, {}, out, arguments[0].space, name=name, autocast=rec.autocast)


def batch_norm_of_vectors(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    if not a["training"] or a["running_mean"] is None or 0 in a["input"].shape:  # an empty batch updates nothing
        return NotImplemented
    operands = [a[name] for name in ("input", "weight", "bias", "eps")]
    targets = [a["running_mean"], a["running_var"]]
    return record_norm_of_vectors(rec, train_norm, operands, targets, a["momentum"], outs[0], autocast=rec.autocast)


def train_norm(
    mean: Tensor, var: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:  # fmt: skip
    return F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps)


@API.rule(F.batch_norm, torch.batch_norm, kind="reduce + broadcast", on_vectors=batch_norm_of_vectors)
def batch_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    vectors = [a[k] for k in ("running_mean", "running_var", "weight", "bias")]
    if not x.is_map or not is_plain(x, 1) or any(v is not None and v.is_map for v in vectors):
        return NotImplemented
    if not a["training"]:
        rec.settled(v for v in vectors if v is not None)
        return record_batch_norm_eval(rec, [x, *vectors, a["eps"]], outs[0], "batch_norm")
    dims = [d for d in range(len(x.shape)) if d != 1]
    mean, var, size = statistics(rec, x, dims, [x.shape[1]])
    record_running_statistics(rec, a, mean, var, size, a["momentum"])
    return normalize(rec, x, mean, var, a["weight"], a["bias"], a["eps"], outs[0])


def normalize_groups(
    rec: Recorder, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float, out: Tensor
) -> tuple[Value, Value, Value, int]:
    """Record a normalisation of each group of channels of each image over its channels and space."""
    n, c = x.shape[:2]
    layout = Layout((x.space.dims[0], (groups,), (c // groups,), *x.space.dims[2:]), x.space.extent)
    view = reshape_map(rec, x, layout)
    mean, var, size = statistics(rec, view, range(2, len(layout.dims)), [n, groups])
    own = [mean, var]
    if not covers_space(view, range(2, len(layout.dims))):  # one for each image: a map along the axes of images
        images = reduced_layout(x, range(1, len(x.shape)), True)
        own = [rec.spread(v, Layout((images.dims[0], (groups,)), images.extent)) for v in own]
    y = normalize(rec, x, own[0], own[1], weight, bias, eps, out, c // groups)
    return y, mean, var, size


def has_plain_channels(x: Value) -> bool:
    """True if dimension 1, channels, has no axis, and a later dimension has one."""
    layout = x.space
    return not layout.has_axis(1) and any(layout.has_axis(d) for d in range(2, len(layout.dims)))


@API.rule(F.group_norm, torch.group_norm, kind="reduce + broadcast")
def group_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    if x.is_map and all(is_plain(x, d) for d in range(1, len(x.shape))):
        given = [x, a["num_groups"], a["weight"], a["bias"], a["eps"]]
        return local(rec, torch.group_norm, given, {}, outs[0], x.space, name="group_norm", autocast=rec.autocast)
    if not x.is_map or not has_plain_channels(x):
        return NotImplemented
    return normalize_groups(rec, x, a["num_groups"], a["weight"], a["bias"], a["eps"], outs[0])[0]


def copy_vector(rec: Recorder, v: Value) -> Value:
    """Record a copy of a vector, as PyTorch copies it: the user may write to the vector before backward."""
    return rec.vector(Tensor.clone, [v], {}, [rec.fake(v.shape, v.dtype, v.device)], name="copy")[0]


@API.rule(F.instance_norm, torch.instance_norm, kind="reduce + broadcast")
def instance_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    if x.is_map and a["running_mean"] is None and all(is_plain(x, d) for d in range(1, len(x.shape))):
        return local(rec, func, args, kwargs, outs[0], x.space, name="instance_norm", autocast=rec.autocast)
    if not x.is_map or not has_plain_channels(x):
        return NotImplemented
    by_running = not a["use_input_stats"]
    vectors = [a[k] for k in (*(("running_mean", "running_var") if by_running else ()), "weight", "bias")]
    if by_running:
        rec.settled(v for v in vectors if v is not None)
    copies = [None if v is None else copy_vector(rec, v) for v in vectors]
    if by_running:
        return record_batch_norm_eval(rec, [x, *copies, a["eps"]], outs[0], "instance_norm")
    weight, bias = copies
    y, mean, var, size = normalize_groups(rec, x, x.shape[1], weight, bias, a["eps"], outs[0])
    record_running_statistics(rec, a, mean, var, size, a["momentum"])
    return y


@API.rule(F.layer_norm, torch.layer_norm, kind="local or reduce + broadcast")
def layer_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Over channels it is local; over channels and all of space it is a GroupNorm of one group."""
    a = arguments(func, args, kwargs)
    x, count = a["input"], len(a["normalized_shape"])
    if not x.is_map:
        return NotImplemented
    rank = len(x.shape)
    normalized = range(rank - count, rank)
    if all(is_plain(x, d) for d in normalized):
        return local(rec, func, args, kwargs, outs[0], x.space, name="layer_norm", autocast=rec.autocast)
    if count != rank - 1 or not has_plain_channels(x):
        return NotImplemented
    y = normalize_groups(rec, x, 1, None, None, a["eps"], outs[0])[0]
    for operator, vector in ((aten.mul.Tensor, a["weight"]), (aten.add.Tensor, a["bias"])):
        if vector is not None:
            y = pointwise(rec, operator, [y, vector], {}, outs)
    return y


# Running statistics ---------------------------------------------------------------------------------------


def update_running(running: Sequence[Tensor], values: Sequence[Tensor], momentum: float) -> None:
    """Update running statistics in place by a batch's."""
    with uncounted_writes(running):
        for target, value in zip(running, values, strict=True):
            target.mul_(1 - momentum).add_(value.to(target.dtype), alpha=momentum)


def record_update_of_running(
    rec: Recorder,
    running: Sequence[Value | None],
    values: Sequence[Value],
    momentum: float,
    new: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda found: found,
) -> None:
    """Have running statistics updated when the batch's are known.

    Args:
        rec: The recorder.
        running: The buffers; None for one that the layer does not have.
        values: Vectors of the batch.
        momentum: Weight of the batch.
        new: Computes the batch's statistics from the vectors.
    """
    targets = [v for v in running if v is not None]

    def write(buffers: Sequence[Tensor], found: Sequence[Tensor], momentum: float = momentum) -> None:
        update_running(buffers, new(found), momentum)

    if targets:
        rec.update(targets, values, write)


#: Norm in train mode that overwrites its first two arguments, running statistics, by the batch's.
Norm = Callable[..., Tensor]


def record_norm_of_vectors(
    rec: Recorder,
    norm: Norm,
    operands: Sequence[Any],
    running: Sequence[Value],
    momentum: float,
    out: Tensor,
    **how: Any,
) -> Value:
    """Record a norm in train mode on vectors alone, which runs whole.

    It overwrites temporary statistics, by which an effect then updates the buffers, in the order of the user's code:
    other layers may share the buffers.
    """
    (channels,), dtype = running[0].shape, running[0].dtype
    fakes = [rec.fake([channels], dtype, out.device) for _ in running]
    given = [norm, channels, dtype, *operands]
    result, *found = rec.vector(norm_with_statistics, given, {}, [out, *fakes], name="batch_norm", **how)
    record_update_of_running(rec, running, found, momentum)
    return result


def norm_with_statistics(norm: Norm, channels: int, dtype: torch.dtype, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return a norm's result and the batch's statistics."""
    mean, var = torch.zeros(2, channels, dtype=dtype, device=x.device)
    return norm(mean, var, x, *rest), mean, var
