"""A map in the memory of the host, below a device of its own.

On CUDA the memory is pinned and transfers have a stream of their own: a copy waits for the kernels that were launched
before it, and nothing else waits for the copy but who asked for it. Where the device is the CPU itself, a map here is
an ordinary tensor, and a tile of it a view.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.transfer import Transfer
from lightning_plugin.layout import Layout


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's transfers run."""
    return torch.cuda.Stream(device)


class HostMemory:
    """One map; see `transfer.Lower`."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, zero: bool = False) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.cuda = device.type == "cuda"
        make = torch.zeros if zero else torch.empty
        self.data = make(layout.shape, dtype=dtype, pin_memory=self.cuda)

    def sending(self, box: Box, tile: Tensor) -> Transfer:
        held, ready = [tile], self.launched()
        return Transfer(held, lambda: self.layout.write_into(self.data, self.whole, self.down(held[0], ready), box))

    def adding(self, box: Box, tile: Tensor) -> Transfer:
        held, ready = [tile], self.launched()
        return Transfer(held, lambda: self.layout.add_into(self.data, self.whole, self.down(held[0], ready), box))

    def fetching(self, box: Box) -> Transfer:
        part = self.layout.narrow(self.data, self.whole, box)
        if not self.cuda:
            return Transfer([], lambda: None, lambda: part)
        held = [torch.empty(part.shape, dtype=part.dtype, device=self.device)]
        ready, done = torch.cuda.current_stream(self.device).record_event(), torch.cuda.Event()

        def run() -> None:
            staged = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
            side = side_stream(self.device)
            with torch.cuda.stream(side):
                side.wait_event(ready)  # the room may have been another tensor's until now
                held[0].copy_(staged, non_blocking=True)
                done.record(side)

        def result() -> Tensor:
            torch.cuda.current_stream(self.device).wait_event(done)
            return held[0]

        return Transfer(held, run, result)

    def launched(self) -> torch.cuda.Event | None:
        """What has to be done on the device before a transfer may touch its tile."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def down(self, tile: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        """A tile on the host. The device's memory is free again as soon as this returns."""
        if ready is None:
            return tile
        side = side_stream(self.device)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            staged = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True)
            staged.copy_(tile, non_blocking=True)
            side.record_event().synchronize()
        return staged
