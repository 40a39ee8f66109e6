"""A map in the memory of the host, below a device of its own.

[Note: mapped] On CUDA the memory is pinned, and the device's kernels read and write it where it lies: a tile of any
strides goes there in one kernel, at the speed of the bus, without a buffer between and without work for the processor.
Those kernels have a stream of their own: a transfer waits for the kernels that were launched before it, and nothing
else waits for the transfer but who asked for it. Transfers run in the order in which they were asked for. Where the
device is the CPU itself, a map here is an ordinary tensor, and a tile of it a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.residency.numbered import Numbered, parts_of
from lightning_plugin.residency.pool import Lend
from lightning_plugin.residency.transfer import Transfer, arriving, beside, launched


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


def make_room_for_pinned(size: int, limit: int) -> None:
    """Have PyTorch's allocator give back pinned memory that nobody uses, where with blocks for so many bytes it would
    have more than its limit: it lends a block again only where one of that size is asked for, and the maps of another
    plan have other sizes."""
    if torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) + 2 * size > limit:
        torch.accelerator.memory.empty_host_cache()


class HostMemory:
    """One map; see `transfer.Lower`."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        zero: bool = False,
        made: Numbered | None = None,
    ) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.cuda = device.type == "cuda"
        self.made = made if self.cuda else None  # elsewhere a tile is a view of what lies where it belongs
        self.data = torch.empty(layout.shape, dtype=dtype, pin_memory=self.cuda)
        if self.cuda and self.data.numel():
            self.data = mapped(self.data, device)
        #: When the last transfer that nobody waits for is done; those before it are done too.
        self.last = beside(device, self.data.zero_, launched(device)) if zero else None

    def __del__(self) -> None:
        last = getattr(self, "last", None)
        if last is not None:
            last.synchronize()  # before the memory is another's

    def sending(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held, ready = [tile.to(self.data.dtype)], launched(self.device)
        return Transfer(
            held, lambda: self.down(lambda: self.layout.write_into(self.data, self.whole, held[0], box), ready)
        )

    def adding(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held, ready = [tile], launched(self.device)
        return Transfer(
            held, lambda: self.down(lambda: self.layout.add_into(self.data, self.whole, held[0], box), ready)
        )

    def fetching(self, box: Box, lend: Lend) -> Transfer:
        # What is read is found when the transfer is done: of some layouts it is a copy, and before, what was written
        # may still be on its way.
        if not self.cuda:
            held: list[Tensor] = []
            return Transfer(held, lambda: held.append(self.part(box)), lambda: held[0])
        room = torch.empty(self.layout.tile_shape(box), dtype=self.data.dtype, device=self.device)
        parts = parts_of(self.made, box)

        def work(here: Tensor) -> None:
            for part, there in parts:
                self.layout.write_into(here, box, self.part(there), part)

        return arriving(room, work, self.note)

    def part(self, box: Box) -> Tensor:
        return self.layout.narrow(self.data, self.whole, box)

    def note(self, done: torch.cuda.Event | None) -> None:
        self.last = done

    def down(self, work: Callable[[], object], ready: torch.cuda.Event | None) -> None:
        """Do a transfer to the host. The tile's memory is free again as soon as this returns."""
        done = beside(self.device, work, ready)
        if done is not None:
            done.synchronize()
