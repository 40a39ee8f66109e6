"""``sync_batchnorm=True``: BatchNorm with the statistics of all ranks' images together, on any device, tiled or not.

A layer's class is changed and nothing else: parameters, buffers, hooks and the user's references to the layer stay.
`torch.nn.SyncBatchNorm`, which the user may have put there, is taken over too: PyTorch's own knows neither tiles nor
CPUs. The statistics are merged so:

    n = Σ nᵣ      μ = Σ nᵣ μᵣ / n      v = Σ nᵣ (vᵣ + (μᵣ - μ)²) / n

over ranks r. Each rank's own statistics are the ordinary reductions of a BatchNorm; only their merging communicates,
and its gradient: with the cotangents of μ and v summed over ranks,

    ∂μᵣ = (∂μ + 2 ∂v (μᵣ - μ)) nᵣ / n      ∂vᵣ = ∂v nᵣ / n

[Note: merges] Ranks have to merge the same layers in the same order, forward and backward, also where their images
differ and so their plans. In a recording each merge therefore takes a number from the one recorded before it. The
number means nothing; it makes forward follow the recorded order, and backward its reverse.
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
from lightning_plugin.rules.norm import Normalization, move, moved, norm_of_vectors, normalize, statistics
from lightning_plugin.rules.reductions import widen
from lightning_plugin.rules.table import API, Recorder


class Synced:
    """Mixed into the class of a BatchNorm; ``original`` is what the layer was.

    ``alone`` where every rank sees all of the batch, so that its own statistics are those of all.
    """

    original: type[BatchNormBase]
    alone = False

    def forward(self: Any, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        group = getattr(self, "process_group", None)
        if self.alone or not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return BatchNormBase.forward(self, x)
        tracked = self.track_running_stats
        return synced_batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self._momentum() if tracked else 0.0,
            self.eps,
            group,
        )

    def _momentum(self: Any) -> float:
        """The share by which running statistics move; counts the batch. Without a momentum they are a plain average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return float(self.momentum)
        return 1.0 / float(self.num_batches_tracked)


class AnyRank(BatchNormBase):
    """`torch.nn.SyncBatchNorm` without its own ways: DDP refuses that class itself on a CPU."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"a BatchNorm takes (N, C, ...), got shape {tuple(x.shape)}")


@cache
def synced(kind: type[BatchNormBase], alone: bool = False) -> type[BatchNormBase]:
    """The class that does what ``kind`` does over all ranks."""
    base = AnyRank if issubclass(kind, nn.SyncBatchNorm) else kind
    return type(f"Synced{kind.__name__}", (Synced, base), {"__module__": __name__, "original": kind, "alone": alone})


def is_batch_norm(module: nn.Module) -> bool:
    """True for a BatchNorm whose computation is known: PyTorch's, or a subclass that keeps its forward."""
    known = (BatchNormBase.forward, nn.SyncBatchNorm.forward)
    return (
        isinstance(module, BatchNormBase)
        and not isinstance(module, InstanceNormBase | Synced)
        and type(module).forward in known
    )


def synchronize(module: nn.Module, everything: bool, alone: bool = False) -> nn.Module:
    """Change the BatchNorms of a module; without ``everything`` only those the user made `torch.nn.SyncBatchNorm`.

    ``alone``: every rank sees all of the batch.
    """
    for layer in module.modules():
        if is_batch_norm(layer) and (everything or isinstance(layer, nn.SyncBatchNorm)):
            layer.__class__ = synced(type(layer), alone)  # type: ignore[arg-type]
    return module


def revert(module: nn.Module) -> nn.Module:
    """Give the layers their own class back."""
    for layer in module.modules():
        if isinstance(layer, Synced):
            layer.__class__ = layer.original  # type: ignore[assignment]
    return module


#: The last merge of each recording; see [Note: merges].
_latest: WeakKeyDictionary[Any, Value] = WeakKeyDictionary()


class Merge(torch.autograd.Function):
    """(mean, variance, elements) of all ranks, and a number for the next merge, from this rank's mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, before: Tensor, count: int, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.group = group
        ctx.pretended = mean.is_meta or isinstance(mean, FakeTensor)
        if ctx.pretended:  # a plan is being rehearsed: the same shapes, and nothing is sent
            total = torch.empty((), dtype=torch.float64, device=mean.device)
            ctx.mark_non_differentiable(total)
            return torch.empty_like(mean), torch.empty_like(var), total, torch.zeros_like(before)
        mine = torch.stack([torch.full_like(mean, count, dtype=torch.float64), mean.double(), var.double()])
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, mine, group=group)
        counts, means, variances = torch.stack(ranks).unbind(1)
        total = counts.sum(0)
        merged = (counts * means).sum(0) / total
        spread = (counts * (variances + (means - merged).square())).sum(0) / total
        ctx.save_for_backward(count / total, mean - merged)
        ctx.mark_non_differentiable(total)
        return merged.to(mean.dtype), spread.to(var.dtype), total[0].clone(), torch.zeros_like(before)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor, d_total: Tensor, d_next: Tensor) -> Any:
        if ctx.pretended:
            return torch.empty_like(d_mean), torch.empty_like(d_var), torch.zeros_like(d_next), None, None
        share, offset = ctx.saved_tensors
        cotangents = torch.stack([d_mean, d_var]).double()
        dist.all_reduce(cotangents, group=ctx.group)
        d_merged, d_spread = cotangents
        here = (d_merged + 2 * d_spread * offset) * share
        return here.to(d_mean.dtype), (d_spread * share).to(d_var.dtype), torch.zeros_like(d_next), None, None


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
    """A training-mode BatchNorm over this rank's batch and those of all others in the group."""
    if has_torch_function((x,)):
        options = (x, weight, bias, running_mean, running_var, momentum, eps, group)
        return handle_torch_function(synced_batch_norm, (x,), *options)  # type: ignore[no-any-return]
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    var, mean = torch.var_mean(widen(x), dims, correction=0)
    mean, var, total, _ = Merge.apply(mean, var, torch.zeros((), requires_grad=mean.requires_grad), count, group)
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            moved([running_mean, running_var], with_unbiased([mean, var, total]), momentum)
    return Normalization.apply(x, mean, var, weight, bias, eps)  # type: ignore[no-any-return]


def with_unbiased(found: Sequence[Tensor]) -> list[Tensor]:
    """Mean, and the variance that running statistics take: by one element less."""
    mean, var, total = found
    return [mean, var * (total / (total - 1).clamp(min=1)).to(var.dtype)]


@API.stand_in(synced_batch_norm)
def without_communication(x: Tensor, *rest: Any) -> Tensor:
    """The result as a recording sees it: of the same shape, and nothing sent."""
    return torch.empty_like(x)


@API.rule(synced_batch_norm, kind="reduce + broadcast")
def record_synced_batch_norm(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, running_mean, running_var, momentum, eps, group = args
    dims = [d for d in range(len(x.shape)) if d != 1]
    mean, var, size = statistics(rec, x, dims, [x.shape[1]])
    before = _latest.get(rec.session) or first(rec, x)
    fakes = [rec.fake([x.shape[1]], mean.dtype, x.device), rec.fake([x.shape[1]], var.dtype, x.device)]
    fakes += [rec.fake([], torch.float64, x.device), rec.fake([], before.dtype, x.device)]
    mean, var, total, after = rec.vector(Merge.apply, (mean, var, before, size, group), {}, fakes, name="merge ranks")
    _latest[rec.session] = after
    move(rec, [running_mean, running_var], [mean, var, total], momentum, with_unbiased)
    return normalize(rec, x, mean, var, weight, bias, eps, outs[0], False)


def first(rec: Recorder, x: Value) -> Value:
    """The number that the first merge of a recording takes."""
    return rec.session.capture(torch.zeros((), device=x.device, requires_grad=True))  # type: ignore[no-any-return]


@API.on_vectors(synced_batch_norm)
def of_vectors(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, weight, bias, running_mean, running_var, momentum, eps, group = args
    if running_mean is None:
        return NotImplemented
    operands = [x, weight, bias, eps, group]
    return norm_of_vectors(rec, train_norm, operands, [running_mean, running_var], momentum, outs[0])


def train_norm(
    mean: Tensor, var: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
) -> Tensor:
    return synced_batch_norm(x, weight, bias, mean, var, 1.0, eps, group)  # type: ignore[no-any-return]
