"""``sync_batchnorm=True``: BatchNorm with statistics over the images of all ranks, on any device, tiled or not.

Only the class of a layer is changed: parameters, buffers, hooks and the user's references to the layer stay. A layer
that the user made `torch.nn.SyncBatchNorm` is converted too: PyTorch's own supports neither tiles nor CPUs. With nᵣ
elements, mean μᵣ and variance vᵣ on rank r, the merged statistics are

    n = Σ nᵣ      μ = Σ nᵣ μᵣ / n      v = Σ nᵣ (vᵣ + (μᵣ - μ)²) / n

A rank computes its own statistics by the ordinary reductions of a BatchNorm; only the merge communicates, and its
gradient: with the cotangents ∂μ and ∂v summed over ranks,

    ∂μᵣ = (∂μ + 2 ∂v (μᵣ - μ)) nᵣ / n      ∂vᵣ = ∂v nᵣ / n

[Note: merges] Ranks have to merge the same layers in the same order, forward and backward, although their images may
differ in size and have different plans. Each recorded merge therefore takes a token, an empty scalar, from the merge
recorded before it: the dependency keeps forward in the recorded order, and backward in its reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from lightning_plugin.graph import Value
from lightning_plugin.private import BatchNormBase, FakeTensor, InstanceNormBase, first_order
from lightning_plugin.rules.norm import (
    Normalization,
    normalize,
    record_norm_of_vectors,
    record_update_of_running,
    statistics,
    update_running,
)
from lightning_plugin.rules.reductions import widen
from lightning_plugin.rules.table import API, Recorder


class Synced:
    """Mixin of a converted BatchNorm's class.

    Attributes:
        original: The layer's former class.
        same_batch: All ranks have the same batch, so that there is nothing to merge.
    """

    original: type[BatchNormBase]
    same_batch = False

    def forward(self: Any, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        group = getattr(self, "process_group", None)
        if self.same_batch or not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return BatchNormBase.forward(self, x)
        tracked = self.track_running_stats
        return synced_batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self._count_batch() if tracked else 0.0,
            self.eps,
            group,
        )

    def _count_batch(self: Any) -> float:
        """Count the batch, and return the weight of its statistics in the running ones: the momentum, or without one
        the weight of a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return float(self.momentum)
        return 1.0 / float(self.num_batches_tracked)


class AnyDimBatchNorm(BatchNormBase):
    """Base of converted `torch.nn.SyncBatchNorm` layers, which take any number of dimensions.

    It does not derive from `torch.nn.SyncBatchNorm`, since DDP refuses that class on a CPU.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"a BatchNorm takes (N, C, ...), got shape {tuple(x.shape)}")


@cache
def synced_class(kind: type[BatchNormBase], same_batch: bool = False) -> type[BatchNormBase]:
    """Return the class that computes ``kind`` over all ranks."""
    base = AnyDimBatchNorm if issubclass(kind, nn.SyncBatchNorm) else kind
    attributes = {"__module__": __name__, "original": kind, "same_batch": same_batch}
    return type(f"Synced{kind.__name__}", (Synced, base), attributes)


def is_batch_norm(module: nn.Module) -> bool:
    """True for PyTorch's BatchNorms and for subclasses that do not override ``forward``."""
    known = (BatchNormBase.forward, nn.SyncBatchNorm.forward)
    return (
        isinstance(module, BatchNormBase)
        and not isinstance(module, InstanceNormBase | Synced)
        and type(module).forward in known
    )


def convert_sync_batchnorm(module: nn.Module, convert_all: bool, same_batch: bool = False) -> nn.Module:
    """Convert the BatchNorms of a module in place.

    Args:
        module: The user's module.
        convert_all: False converts only layers that are `torch.nn.SyncBatchNorm` already.
        same_batch: All ranks have the same batch.
    """
    for layer in module.modules():
        if is_batch_norm(layer) and (convert_all or isinstance(layer, nn.SyncBatchNorm)):
            layer.__class__ = synced_class(type(layer), same_batch)  # type: ignore[arg-type]
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Restore the original classes of converted layers."""
    for layer in module.modules():
        if isinstance(layer, Synced):
            layer.__class__ = layer.original  # type: ignore[assignment]
    return module


#: The token of the last merge of each recording; see [Note: merges].
_last_tokens: WeakKeyDictionary[Any, Value] = WeakKeyDictionary()


class Merge(torch.autograd.Function):
    """(mean, variance, token) of this rank → (mean, variance, number of elements, token) of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, token: Tensor, count: int, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.group = group
        ctx.is_fake = mean.is_meta or isinstance(mean, FakeTensor)
        if ctx.is_fake:  # in a rehearsal of a plan nothing is sent
            total = torch.empty((), dtype=torch.float64, device=mean.device)
            ctx.mark_non_differentiable(total)
            return torch.empty_like(mean), torch.empty_like(var), total, torch.zeros_like(token)
        mine = torch.stack([torch.full_like(mean, count, dtype=torch.float64), mean.double(), var.double()])
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, mine, group=group)
        counts, means, variances = torch.stack(ranks).unbind(1)
        total = counts.sum(0)
        merged_mean = (counts * means).sum(0) / total
        merged_var = (counts * (variances + (means - merged_mean).square())).sum(0) / total
        ctx.save_for_backward(count / total, mean - merged_mean)
        ctx.mark_non_differentiable(total)
        return merged_mean.to(mean.dtype), merged_var.to(var.dtype), total[0].clone(), torch.zeros_like(token)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor, d_total: Tensor, d_token: Tensor) -> Any:
        if ctx.is_fake:
            return torch.empty_like(d_mean), torch.empty_like(d_var), torch.zeros_like(d_token), None, None
        share, offset = ctx.saved_tensors
        cotangents = torch.stack([d_mean, d_var]).double()
        dist.all_reduce(cotangents, group=ctx.group)
        d_merged_mean, d_merged_var = cotangents
        d_own_mean = (d_merged_mean + 2 * d_merged_var * offset) * share
        d_own_var = d_merged_var * share
        return d_own_mean.to(d_mean.dtype), d_own_var.to(d_var.dtype), torch.zeros_like(d_token), None, None


def synced_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    group: Any = None,
) -> Tensor:
    """Compute a training-mode BatchNorm over the batches of all ranks in the group."""
    if has_torch_function((x,)):
        options = (x, weight, bias, running_mean, running_var, momentum, eps, group)
        return handle_torch_function(synced_batch_norm, (x,), *options)  # type: ignore[no-any-return]
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    var, mean = torch.var_mean(widen(x), dims, correction=0)
    mean, var, total, _ = Merge.apply(mean, var, torch.zeros((), requires_grad=mean.requires_grad), count, group)
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            update_running([running_mean, running_var], with_unbiased_var([mean, var, total]), momentum)
    return Normalization.apply(x, mean, var, weight, bias, eps)  # type: ignore[no-any-return]


def with_unbiased_var(statistics: Sequence[Tensor]) -> list[Tensor]:
    """Return mean and unbiased variance, for the running statistics, from mean, biased variance and element count."""
    mean, var, total = statistics
    return [mean, var * (total / (total - 1).clamp(min=1)).to(var.dtype)]


def fake_result(x: Tensor, *rest: Any) -> Tensor:
    """Return the result on fake tensors, for the recording: nothing is sent."""
    return torch.empty_like(x)


def record_synced_batch_norm_of_vectors(
    rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]
) -> Any:
    x, weight, bias, running_mean, running_var, momentum, eps, group = args
    if running_mean is None:
        return NotImplemented
    operands = [x, weight, bias, eps, group]
    return record_norm_of_vectors(rec, train_norm, operands, [running_mean, running_var], momentum, outs[0])


def train_norm(
    mean: Tensor, var: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
) -> Tensor:
    return synced_batch_norm(x, weight, bias, mean, var, 1.0, eps, group)  # type: ignore[no-any-return]


@API.rule(
    synced_batch_norm,
    kind="reduce + broadcast",
    on_vectors=record_synced_batch_norm_of_vectors,
    stand_in=fake_result,
)
def record_synced_batch_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, running_mean, running_var, momentum, eps, group = args
    dims = [d for d in range(len(x.shape)) if d != 1]
    mean, var, size = statistics(rec, x, dims, [x.shape[1]])
    token = _last_tokens.get(rec.session) or first_token(rec, x)
    fakes = [rec.fake([x.shape[1]], mean.dtype, x.device), rec.fake([x.shape[1]], var.dtype, x.device)]
    fakes += [rec.fake([], torch.float64, x.device), rec.fake([], token.dtype, x.device)]
    mean, var, total, token = rec.vector(Merge.apply, (mean, var, token, size, group), {}, fakes, name="merge ranks")
    _last_tokens[rec.session] = token
    record_update_of_running(rec, [running_mean, running_var], [mean, var, total], momentum, with_unbiased_var)
    return normalize(rec, x, mean, var, weight, bias, eps, outs[0])


def first_token(rec: Recorder, x: Value) -> Value:
    """Capture the token that the first merge of a recording takes."""
    return rec.session.capture(torch.zeros((), device=x.device, requires_grad=True))  # type: ignore[no-any-return]
