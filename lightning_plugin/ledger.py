"""What is really live on the device during a step.

On a CPU the ledger watches every operator and counts the storages it makes, each once, until it dies; on CUDA it asks
the allocator. What existed before the step (parameters, the user's own tensors) is not counted as made by it; the
planner adds parameters and gradients where it promises a budget.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger:
    """Bytes alive now and at the worst moment."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._refs: dict[int, tuple[Any, int]] = {}

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._refs or storage.device.type == "meta":  # fake tensors hold nothing
            return
        storage_bytes = storage.nbytes()
        if not storage_bytes:
            return
        self._refs[key] = (weakref.ref(storage, lambda _, key=key: self._gone(key)), storage_bytes)
        self.live += storage_bytes
        self.peak = max(self.peak, self.live)

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage."""
        storage = tensor.untyped_storage()
        self._refs.setdefault(storage._cdata, (storage, 0))

    def _gone(self, key: int) -> None:
        found = self._refs.pop(key, None)
        if found is not None:
            self.live -= found[1]


class Watcher(TorchDispatchMode):
    """Shows a ledger every tensor an operator makes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        see = self.ledger.see
        if type(out) is Tensor:
            see(out)
        else:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    see(t)
        return out
