"""Weights of classes in a loss: given, or from how often each class occurs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Weights = Sequence[float] | Literal["balanced"] | None


class ClassWeights(nn.Module):
    """One weight for each class. "balanced" ones are learnt from the training slides and kept in the checkpoint."""

    def __init__(self, weights: Weights, count: int, name: str = "class_weights") -> None:
        super().__init__()
        if isinstance(weights, str) and weights != "balanced":
            raise ValueError(f"{name} is {weights!r}; give a number for each class, balanced, or null")
        given = None if weights is None or isinstance(weights, str) else tuple(weights)
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} numbers for {count} classes")
        if given is not None and min(given) < 0:
            raise ValueError(f"{name} is {list(given)}; a weight cannot be negative")
        self.balanced = isinstance(weights, str)
        self.register_buffer("values", torch.ones(count) if given is None else torch.tensor(given))
        self.values: Tensor

    def balance(self, counts: Tensor) -> None:
        """Weigh each class by the inverse of its count, with a mean of 1 over the slides."""
        if self.balanced:
            present = counts > 0
            weights = counts.sum() / (present.sum() * counts.clamp(min=1))
            self.values.copy_(torch.where(present, weights, torch.ones_like(weights)))

    def forward(self, like: Tensor) -> Tensor:
        """The weights in the dtype and on the device of another tensor."""
        return self.values.to(like)
