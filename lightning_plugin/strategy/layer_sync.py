"""``sync_batchnorm=True``: every BatchNorm of a module computes its statistics over all ranks.

A layer's class is changed and nothing else: parameters, buffers, hooks and the user's references to the layer stay.
`torch.nn.SyncBatchNorm`, which the user may have put there, is taken over too: PyTorch's own knows neither tiles nor
CPUs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_plugin.private import BatchNormBase, InstanceNormBase
from lightning_plugin.strategy.synced import synced_batch_norm


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
        """How far running statistics move; counts the batch. Without a momentum they are a plain average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return float(self.momentum)
        return 1.0 / float(self.num_batches_tracked)


class AnyRank(BatchNormBase):
    """What `torch.nn.SyncBatchNorm` is without its own ways: DDP refuses that class itself on a CPU."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"a BatchNorm takes (N, C, ...), got shape {tuple(x.shape)}")


@cache
def synced(kind: type[BatchNormBase], alone: bool = False) -> type[BatchNormBase]:
    """The class that does what ``kind`` does over all ranks."""
    base = AnyRank if issubclass(kind, nn.SyncBatchNorm) else kind
    return type(f"Synced{kind.__name__}", (Synced, base), {"__module__": __name__, "original": kind, "alone": alone})


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a layer is a BatchNorm whose computation is known: PyTorch's, or a subclass that keeps its forward."""
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
