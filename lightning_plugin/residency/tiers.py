"""Memory of the tiers for maps and streamed tensors.

    tier      a map lies in                      a streamed tensor lies in
    device    an ordinary tensor                 (it is not streamed)
    host      pinned memory, a `HostMemory`      pinned memory
    disk      a file, a `DiskFile`               a mapped file, a `MappedFile`

On a CPU the tiers "device" and "host" are the same memory; the ledger counts them apart.

[Note: mapped] On CUDA the host's memory is pinned, and kernels of the device read and write it directly: one kernel
transfers a tile of any strides at the speed of the bus, without a buffer and without work for the processor. These
kernels have a stream of their own. A transfer waits for the kernels that were launched before it; only its caller
waits for the transfer. Transfers run in the order of their calls. If the device is the CPU itself, a map on the host is
an ordinary tensor, and its tiles are views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import TileNumbers, stored_parts
from lightning_plugin.layout import Layout
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.transfer import (
    Lend,
    Lower,
    Pending,
    Prefetched,
    Transfer,
    TransferQueue,
    event_after_launched,
    run_on_transfer_stream,
    transfer_to_device,
)


class CudaArray:
    """Pinned memory under CUDA's array interface, by which PyTorch takes it for memory of the device."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.data.nbytes,), "typestr": "|u1", "data": (self.data.data_ptr(), False), "version": 2}


def map_to_device(data: Tensor, device: torch.device) -> Tensor:
    """Return pinned memory as a tensor of the device, whose kernels reach it over the bus."""
    return torch.as_tensor(CudaArray(data), device=device).view(data.dtype).view(data.shape)


def make_room_for_pinned(size: int, limit: int) -> None:
    """Return unused pinned memory of PyTorch's allocator to the system, if ``size`` more bytes would exceed the limit.

    The allocator reuses a block only for requests of the same size, and maps of another plan have other sizes. It
    rounds sizes up to powers of two, so that a map may take twice its bytes.
    """
    if torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) + 2 * size > limit:
        torch.accelerator.memory.empty_host_cache()


class HostMemory:
    """A map on the host; see `transfer.Lower`.

    Attributes:
        last: Event of the end of the last transfer without a waiting caller; earlier transfers are done by then too.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        zero: bool = False,
        numbered: TileNumbers | None = None,
    ) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.cuda = device.type == "cuda"
        self.numbered = numbered if self.cuda else None  # elsewhere tiles are views of the data at their own positions
        self.data = torch.empty(layout.shape, dtype=dtype, pin_memory=self.cuda)
        if self.cuda and self.data.numel():
            self.data = map_to_device(self.data, device)
        self.last = run_on_transfer_stream(device, self.data.zero_, event_after_launched(device)) if zero else None

    def __del__(self) -> None:
        last = getattr(self, "last", None)
        if last is not None:
            last.synchronize()  # before the memory is reused

    def prepare_write(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held, ready = [tile.to(self.data.dtype)], event_after_launched(self.device)

        def work() -> None:
            self.layout.write_into(self.data, self.whole, held[0], box)

        return Transfer(held, lambda: self._to_host(work, ready))

    def prepare_add(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        held, ready = [tile], event_after_launched(self.device)

        def work() -> None:
            self.layout.add_into(self.data, self.whole, held[0], box)

        return Transfer(held, lambda: self._to_host(work, ready))

    def prepare_read(self, box: Box, lend: Lend) -> Transfer:
        # Slice when the transfer runs: for some layouts a slice is a copy, and writes may be pending before.
        if not self.cuda:
            held: list[Tensor] = []
            return Transfer(held, lambda: held.append(self._slice(box)), lambda: held[0])
        room = torch.empty(self.layout.tile_shape(box), dtype=self.data.dtype, device=self.device)
        parts = stored_parts(self.numbered, box)

        def work(here: Tensor) -> None:
            for part, there in parts:
                self.layout.write_into(here, box, self._slice(there), part)

        return transfer_to_device(room, work, self._set_last)

    def _slice(self, box: Box) -> Tensor:
        return self.layout.narrow(self.data, self.whole, box)

    def _set_last(self, done: torch.cuda.Event | None) -> None:
        self.last = done

    def _to_host(self, work: Callable[[], object], ready: torch.cuda.Event | None) -> None:
        """Do a transfer to the host, and wait for it, so that the caller may free the tile."""
        done = run_on_transfer_stream(self.device, work, ready)
        if done is not None:
            done.synchronize()


class DeviceMemory:
    """A map on the device, with the methods of a `LowerMap`. Its tiles are views."""

    finds_by_number = False

    def __init__(self, layout: Layout, data: Tensor) -> None:
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.data = data

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.layout.write_into(self.data, self.whole, tile, box)

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.layout.add_into(self.data, self.whole, tile, box)

    def read(self, box: Box) -> Tensor:
        return self.layout.narrow(self.data, self.whole, box)

    def prefetch(self, box: Box) -> None:
        return

    def wait(self) -> None:
        return

    def set_largest_tile(self, largest: int) -> None:
        return


class LowerMap:
    """A map on a lower tier, written and read through a transfer queue.

    Attributes:
        largest: Positions of the map's largest tile in the current pass.
        finds_by_number: True if a tile equal to an earlier one need not be written; see [Note: stored once] in
            `constants`.
    """

    def __init__(self, lower: Lower, queue: TransferQueue) -> None:
        self.largest = 0
        self.lower = lower
        self.queue = queue
        self.pending_write: Pending | None = None
        self.prefetched: Prefetched[Box] = Prefetched()
        self.finds_by_number = lower.numbered is not None

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self._send(self.lower.prepare_write, box, tile, ahead)

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self._send(self.lower.prepare_add, box, tile, ahead)

    def _send(self, prepare: Callable[[Box, Tensor, Lend], Transfer], box: Box, tile: Tensor, ahead: bool) -> None:
        self.wait_for_writes()
        self.pending_write = self.queue.send(prepare(box, tile, self.queue.pool.lender(box, self.largest)), ahead)
        if not ahead:
            self.wait_for_writes()

    def prefetch(self, box: Box) -> None:
        """Start to read a box that the next tile needs."""
        self.prefetched.start(box, lambda: self._start_read(box, ahead=True))

    def _start_read(self, box: Box, ahead: bool) -> Pending:
        return self.queue.send(self.lower.prepare_read(box, self.queue.pool.lender(box, self.largest)), ahead)

    def read(self, box: Box) -> Tensor:
        """Return a box: the prefetched one, or one that is read now, after pending writes."""
        return self.prefetched.take(box, lambda: self._start_read(box, ahead=self.pending_write is not None))

    def set_largest_tile(self, largest: int) -> None:
        self.largest = largest

    def wait_for_writes(self) -> None:
        """Wait for the pending write."""
        if self.pending_write is not None:
            write, self.pending_write = self.pending_write, None
            write.wait()

    def wait(self) -> None:
        """Wait for all transfers, in both directions."""
        self.wait_for_writes()
        self.prefetched.wait()


@dataclass(frozen=True)
class Home:
    """The tier of a map, and the queue of its transfers, if the tier is a lower one."""

    tier: str = "device"
    queue: TransferQueue = field(default_factory=TransferQueue)

    def allocate(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        zero: bool = False,
        numbered: TileNumbers | None = None,
    ) -> DeviceMemory | LowerMap:
        """Allocate memory for a map; a lower tier stores tiles with equal numbers once."""
        if self.tier == "device":
            make = torch.zeros if zero else torch.empty
            return DeviceMemory(layout, make(layout.shape, dtype=dtype, device=device))
        lower: Lower
        if self.queue.make_stand_in is not None:
            lower = self.queue.make_stand_in(layout, dtype, device, self.tier)
        elif self.tier == "host":
            lower = HostMemory(layout, dtype, device, zero, numbered)
        else:  # a file is zero before it is written
            lower = DiskFile(layout, dtype, device, self.queue.folder, numbered)
        return LowerMap(lower, self.queue)
