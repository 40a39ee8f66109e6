"""A map in the memory of the host, below a device of its own.

[Note: mapped] On CUDA the memory is pinned, and the device's kernels read and write it where it lies: a tile of any
strides goes there in one kernel, at the speed of the bus, without a buffer between and without work for the processor.
Those kernels have a stream of their own: a transfer waits for the kernels that were launched before it, and nothing
else waits for the transfer but who asked for it. Transfers run in the order in which they were asked for. Where the
device is the CPU itself, a map here is an ordinary tensor, and a tile of it a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


class Bytes:
    """Pinned memory in the words in which PyTorch takes over memory of a device; it keeps the memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.data.nbytes,), "typestr": "|u1", "data": (self.data.data_ptr(), False), "version": 2}


def mapped(data: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of the device, whose kernels reach it over the bus."""
    return torch.as_tensor(Bytes(data), device=device).view(data.dtype).view(data.shape)


class HostMemory:
    """One map; see `transfer.Lower`."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, zero: bool = False) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.cuda = device.type == "cuda"
        self.data = torch.empty(layout.shape, dtype=dtype, pin_memory=self.cuda)
        if self.cuda and self.data.numel():
            self.data = mapped(self.data, device)
        #: When the last transfer that nobody waits for is done; those before it are done too.
        self.last = self.beside(self.data.zero_, self.launched()) if zero else None

    def __del__(self) -> None:
        last = getattr(self, "last", None)
        if last is not None:
            last.synchronize()  # before the memory is another's

    def sending(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        held, ready = [tile.to(self.data.dtype)], self.launched()

        def write() -> None:
            self.layout.write_into(self.data, self.whole, held[0], box)

        return Transfer(held, lambda: self.down(write, ready))

    def adding(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        held, ready = [tile], self.launched()

        def add() -> None:
            self.layout.add_into(self.data, self.whole, held[0], box)

        return Transfer(held, lambda: self.down(add, ready))

    def fetching(self, box: Box, lender: Lender) -> Transfer:
        if not self.cuda:
            part = self.layout.narrow(self.data, self.whole, box)
            return Transfer([], lambda: None, lambda: part)
        room = torch.empty(self.layout.tile_shape(box), dtype=self.data.dtype, device=self.device)
        held, ready = [room], self.launched()  # the room may have been another tensor's until now
        del room
        done: list[torch.cuda.Event | None] = []

        def fetch() -> None:
            held[0].copy_(self.layout.narrow(self.data, self.whole, box))

        def run() -> None:
            self.last = self.beside(fetch, ready)
            done.append(self.last)

        def result() -> Tensor:
            assert done[0] is not None
            torch.cuda.current_stream(self.device).wait_event(done[0])
            return held[0]

        return Transfer(held, run, result)

    def launched(self) -> torch.cuda.Event | None:
        """What has to be done on the device before a transfer may touch its tile."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def beside(self, work: Callable[[], object], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Launch a transfer on its own stream, after what is to be ready; the event is when it is done."""
        if ready is None:
            work()
            return None
        side = side_stream(self.device)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            work()
            return side.record_event()

    def down(self, work: Callable[[], object], ready: torch.cuda.Event | None) -> None:
        """Do a transfer to the host. The tile's memory is free again as soon as this returns."""
        done = self.beside(work, ready)
        if done is not None:
            done.synchronize()
