"""The last layer where a head has a vector for each output."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class BranchLinear(nn.Module):
    """Each output is a linear function of its own vector alone, out of `outputs` vectors side by side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(1, tuple(self.weight.shape)) * self.weight).sum(dim=2) + self.bias
