"""The tiers, and what each does for a map and for a tensor.

    tier      a map lies in                      a streamed tensor lies in
    device    an ordinary tensor                 (it is not streamed)
    host      pinned memory, a `HostMemory`      pinned memory
    disk      a file, a `DiskFile`               a mapped file, a `MappedFile`

On a CPU the host's memory is the device's too. There the tier "host" is no other memory, only other accounts.

[Note: mapped] On CUDA the host's memory is pinned, and the device's kernels read and write it where it lies: a tile of
any strides goes there in one kernel, at the speed of the bus, without a buffer between and without work for the
processor. Those kernels have a stream of their own: a transfer waits for the kernels that were launched before it, and
nothing else waits for the transfer but who asked for it. Transfers run in the order in which they were asked for. Where
the device is the CPU itself, a map here is an ordinary tensor, and a tile of it a view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Numbered, parts_of
from lightning_plugin.layout import Layout
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.transfer import (
    Arrivals,
    Lend,
    Lower,
    Pending,
    Transfer,
    TransferQueue,
    arriving,
    beside,
    launched,
)


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


class DeviceMemory:
    """One map, with the methods of a `LowerMap`. Its tiles are views, so that each lies where it belongs."""

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


class LowerMap:
    """A map on a lower tier, written and read through a transfer queue. ``largest`` are the positions of its largest
    tile in the pass at hand."""

    def __init__(self, there: Lower, queue: TransferQueue) -> None:
        self.largest = 0
        self.there = there
        self.queue = queue
        self.sent: Pending | None = None
        self.fetched: Arrivals[Box] = Arrivals()
        #: True if a tile for which another stands need not be written; see [Note: stored once] in
        #: `constants`.
        self.finds = there.made is not None

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.send(self.there.sending, box, tile, ahead)

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.send(self.there.adding, box, tile, ahead)

    def send(self, ready: Callable[[Box, Tensor, Lend], Transfer], box: Box, tile: Tensor, ahead: bool) -> None:
        self.settle()
        self.sent = self.queue.send(ready(box, tile, self.queue.pool.lender(box, self.largest)), ahead)
        if not ahead:
            self.settle()

    def fetch(self, box: Box) -> None:
        """Begin to read a box that will be asked for."""
        self.fetched.begin(box, lambda: self.fetching(box, ahead=True))

    def fetching(self, box: Box, ahead: bool) -> Pending:
        return self.queue.send(self.there.fetching(box, self.queue.pool.lender(box, self.largest)), ahead)

    def read(self, box: Box) -> Tensor:
        """A box, which was fetched, or is read now: after what is on its way there."""
        return self.fetched.take(box, lambda: self.fetching(box, ahead=self.sent is not None))

    def expect(self, largest: int) -> None:
        self.largest = largest

    def settle(self) -> None:
        """Wait for what is on its way there."""
        if self.sent is not None:
            sent, self.sent = self.sent, None
            sent.wait()

    def rest(self) -> None:
        """Nothing is on its way in either direction."""
        self.settle()
        self.fetched.rest()


@dataclass(frozen=True)
class Home:
    """The tier of a map, and the queue of its transfers where that is a lower one."""

    tier: str = "device"
    queue: TransferQueue = field(default_factory=TransferQueue)

    def room(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        zero: bool = False,
        made: Numbered | None = None,
    ) -> DeviceMemory | LowerMap:
        """Room for a map, of which a lower tier finds some tiles by their numbers."""
        if self.tier == "device":
            return DeviceMemory(layout, dtype, device, zero)
        there: Lower
        if self.queue.stand is not None:
            there = self.queue.stand(layout, dtype, device, self.tier)
        elif self.tier == "host":
            there = HostMemory(layout, dtype, device, zero, made)
        else:  # a file is zero where nothing was written
            there = DiskFile(layout, dtype, device, self.queue.folder, made)
        return LowerMap(there, self.queue)
