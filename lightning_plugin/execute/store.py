"""Where a boundary lives between the segment that makes it and the segments that read it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.rules.reduce import wide


class Cotangent:
    """The gradient of a stored map while backward collects it.

    It is complete only when all consumers have added their part; it is accumulated in float32 or wider.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.dtype = dtype
        self.device = device
        self.data: Tensor | None = None

    def add(self, box: Box, gradient: Tensor) -> None:
        if self.data is None:
            self.data = torch.zeros(self.layout.shape, dtype=wide(self.dtype), device=self.device)
        self.layout.add_into(self.data, self.whole, gradient, box)

    def read(self, box: Box) -> Tensor:
        if self.data is None:
            raise AssertionError("a cotangent is read before anything was added to it")
        return self.layout.narrow(self.data, self.whole, box).to(self.dtype)

    def clear(self) -> None:
        self.data = None


class Handle:
    """A stored map. Its cotangent outlives its data: see [Note: leases] in `segment`."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.data = layout.empty(self.whole, dtype, device)
        self.cotangent = Cotangent(layout, dtype, device)

    def write(self, box: Box, tile: Tensor) -> None:
        self.layout.write_into(self.data, self.whole, tile, box)

    def read(self, box: Box) -> Tensor:
        return self.layout.narrow(self.data, self.whole, box)


class Adder:
    """Sums gradients of one tensor over tiles, in float32 or wider."""

    def __init__(self, like: Tensor):
        self.dtype = like.dtype
        self.total: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if self.total is None:
            self.total = gradient.to(wide(self.dtype), copy=gradient.dtype == wide(self.dtype))
        else:
            self.total.add_(gradient)

    def result(self) -> Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)
