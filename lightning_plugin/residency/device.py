"""A map on the device: nothing has to be transferred, and a tile that is read is a view."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout


class DeviceMemory:
    """One map, with the methods of a `lane.Lane`. Its tiles are views, so that each lies where it belongs."""

    finds = False

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, zero: bool = False) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        make = torch.zeros if zero else torch.empty
        self.data = make(layout.shape, dtype=dtype, device=device)

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.layout.write_into(self.data, self.whole, tile, box)

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.layout.add_into(self.data, self.whole, tile, box)

    def read(self, box: Box) -> Tensor:
        return self.layout.narrow(self.data, self.whole, box)

    def fetch(self, box: Box) -> None:
        return

    def rest(self) -> None:
        return

    def expect(self, largest: int) -> None:
        return
