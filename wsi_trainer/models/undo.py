"""Putting a module back as it was before a step that failed half way."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Snapshot:
    """Gradients and buffers of a module before a step.

    Gradients are there only between the slides of one step of the optimizer. They are kept on the host: they do not
    count against the device's budget.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients = [None if p.grad is None else _kept(p.grad) for p in module.parameters()]
        self.buffers = [_kept(buffer) for buffer in module.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what the step did to gradients and buffers."""
        for parameter, gradient in zip(self.module.parameters(), self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for buffer, value in zip(self.module.buffers(), self.buffers, strict=True):
            buffer.copy_(value)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
