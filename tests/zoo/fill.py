"""Deterministic parameters for the tests, with nothing left at a value that hides an error.

Freshly built networks hide errors: a layer scale of 1e-6 or a residual branch whose last norm starts at zero
makes the gradients behind it vanish, and a running variance of one makes eval mode a no-op.
"""

from __future__ import annotations

import torch
from torch import nn


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite all parameters and running statistics of ``module`` from ``seed``; returns ``module``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_parameter(parameter, generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * _normal(buffer, generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + _uniform(buffer, generator))
    return module


def _parameter(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
    if fan_in > 1:  # convolution and linear weights: keep the signal's size through a ReLU
        return _normal(parameter, generator) * (2.0 / fan_in) ** 0.5
    # Norm scales, biases, layer scales and the rest: any value away from zero will do.
    return 0.25 + 0.75 * _uniform(parameter, generator)


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, generator=generator, dtype=torch.float64)
