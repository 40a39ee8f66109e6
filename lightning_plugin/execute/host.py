"""A map in the memory of the host, below a device of its own.

On CUDA the memory is pinned and transfers have a stream of their own: a copy waits for the kernels that were launched
before it, and nothing else waits for the copy but who asked for it, and who next borrows the buffer it is made from.
Where the device is the CPU itself, a map here is an ordinary tensor, and a tile of it a view.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.pool import Lender
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

    def sending(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        held, ready = self.staged(tile.to(self.data.dtype), lender), self.launched()
        return Transfer(held, lambda: self.layout.write_into(self.data, self.whole, self.down(held, ready), box))

    def adding(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        held, ready = self.staged(tile, lender), self.launched()
        return Transfer(held, lambda: self.layout.add_into(self.data, self.whole, self.down(held, ready), box))

    def fetching(self, box: Box, lender: Lender) -> Transfer:
        part = self.layout.narrow(self.data, self.whole, box)
        if not self.cuda:
            return Transfer([], lambda: None, lambda: part)
        done = torch.cuda.Event()
        staged = lender.lend(part.shape, part.dtype, pinned=True, until=done)
        held = [torch.empty(part.shape, dtype=part.dtype, device=self.device), staged]
        del staged
        ready = torch.cuda.current_stream(self.device).record_event()

        def run() -> None:
            held[1].copy_(part)
            side = side_stream(self.device)
            with torch.cuda.stream(side):
                side.wait_event(ready)  # the room may have been another tensor's until now
                held[0].copy_(held[1], non_blocking=True)
                done.record(side)

        def result() -> Tensor:
            torch.cuda.current_stream(self.device).wait_event(done)
            return held[0]

        return Transfer(held, run, result)

    def launched(self) -> torch.cuda.Event | None:
        """What has to be done on the device before a transfer may touch its tile."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def staged(self, tile: Tensor, lender: Lender) -> list[Tensor]:
        """A tile, and where it will be on the host."""
        return [tile, lender.lend(tile.shape, tile.dtype, pinned=True)] if self.cuda else [tile]

    def down(self, held: list[Tensor], ready: torch.cuda.Event | None) -> Tensor:
        """A tile on the host. The device's memory is free again as soon as this returns."""
        if ready is None:
            return held[0]
        side = side_stream(self.device)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            held[1].copy_(held[0], non_blocking=True)
            side.record_event().synchronize()
        return held[1]
