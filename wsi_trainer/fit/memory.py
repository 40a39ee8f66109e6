"""Memory of a step: what plain PyTorch holds for backward, and what the process really used."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import torch
from torch import Tensor, nn


def held_for_backward(module: nn.Module, image: Tensor, *others: Any) -> int:
    """Bytes that plain PyTorch holds between forward and backward for this image: the image and saved
    activations.

    Measured on one real forward pass: every storage that autograd saves is counted once, parameters are not.

    Args:
        module: The network.
        image: Its first argument.
        others: Its further ones.
    """
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    held = {image.untyped_storage().data_ptr(): image.untyped_storage().nbytes()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # a freed storage could give its address to the next one
        return tensor

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), torch.enable_grad():
        module(image, *others)
    return sum(held.values())


def process_peak() -> int:
    """The most resident memory this process has had, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_bytes(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the loop ends at TiB")
