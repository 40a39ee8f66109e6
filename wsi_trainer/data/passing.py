"""What a source passes on that stands before another one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource


class PassingSource:
    """A `TileSource` but for `read` and `prefetch`, by the one that is its `source`."""

    source: TileSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def instances(self) -> int | None:
        """How many of the first dimensions count images; None where the source knows of space alone."""
        return getattr(self.source, "instances", None)

    def constant(self, box: Box) -> Tensor | None:
        return self.source.constant(box)

    def forget(self) -> None:
        """Has the source let go of pixels, if it keeps any."""
        forget = getattr(self.source, "forget", None)
        if forget is not None:
            forget()
