"""Registry entry of one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ZooEntry:
    """One model, in the size the exactness tests run and in the size the planning tests plan.

    ``build`` gives the tiny version with PyTorch's own random initial parameters; ``fill`` makes them
    deterministic and free of zeros.  ``full`` gives the published size: build it under
    ``torch.device("meta")``, some have over a hundred million parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """(N, C, *spatial) of a small input for ``build()``, odd on purpose."""
    dense: bool
    """The output is a map: one value for each output position."""
    full: Callable[[], nn.Module] | None = None
    stochastic: bool = False
    """Dropout or stochastic depth is active in train mode."""
    min_size: int = 1
    """The smallest side, in every direction, that ``build()`` takes in train mode with a batch of two."""

    def published(self) -> nn.Module:
        """The network in its published size."""
        assert self.full is not None, f"{self.name} has no published size"
        return self.full()

    @property
    def other_shape(self) -> tuple[int, ...]:
        """A second odd shape, with another batch size and another aspect ratio."""
        batch, channels, *spatial = self.shape
        return (batch + 1, channels, *(side + 4 + 2 * axis for axis, side in enumerate(spatial)))

    @property
    def min_shape(self) -> tuple[int, ...]:
        return (2, self.shape[1], *(self.min_size for _ in self.shape[2:]))
