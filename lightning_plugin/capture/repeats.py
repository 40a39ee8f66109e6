"""Effects that happen once more in backward.

[Note: checkpoint] A block in `torch.utils.checkpoint` runs again in backward, so that plain PyTorch moves the running
statistics of a BatchNorm within it twice. What is recorded of it does not run again. So a backward pass that comes to a
result which was computed from the statistics has them moved once more, by the values that they were moved by before:
block by block from the last one, in a block in the order of the user's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from lightning_plugin.graph import Effect
from lightning_plugin.passes import current_pass


@dataclass(eq=False)
class Repeat:
    """An effect with its values; ``seen`` is the last pass that had it happen."""

    effect: Effect
    tensors: Sequence[Tensor]
    seen: int = field(default=-1, init=False)


@dataclass(frozen=True, eq=False)
class InBackward:
    """Hook of a result: has effects behind it happen again, once in a pass."""

    repeats: Sequence[Repeat]

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> None:
        now = current_pass()
        blocks = [list(block) for _, block in groupby(self.repeats, lambda r: r.effect.block)]
        for repeat in (r for block in reversed(blocks) for r in block if r.seen != now):
            repeat.seen = now
            repeat.effect.run(repeat.tensors)
            if repeat.effect.count is not None:
                repeat.effect.count.add_(1)
