"""A step of `torch.compile` that may keep a part of what backward needs; the compiler is imported with this file."""

from __future__ import annotations

import torch
import torch._functorch.config as settings
import torch._inductor.compile_fx  # before memory is looked at
from torch import Tensor

from benchmarks.peers.networks import Headed
from benchmarks.peers.steps import Step, loss_of
from benchmarks.peers.works import Work

#: The share of what it would keep by itself.
KEPT = 0.3


def compiled(net: Headed, image: Tensor, work: Work) -> Step:
    settings.activation_memory_budget = KEPT
    fast = torch.compile(net)
    return lambda: loss_of(fast(image)).backward()
