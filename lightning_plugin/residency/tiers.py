"""The tiers, and what each does for a map and for a tensor.

    tier      a map lies in                      a streamed tensor lies in
    device    an ordinary tensor                 (it is not streamed)
    host      pinned memory, a `HostMemory`      pinned memory
    disk      a file, a `DiskFile`               a mapped file, a `MappedFile`

On a CPU the host's memory is the device's too. There the tier "host" is no other memory, only other accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.host import HostMemory
from lightning_plugin.residency.numbered import Numbered
from lightning_plugin.residency.transfer import Arrivals, Lower, Pending, TransferQueue


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
        #: Whether a tile for which another stands need not be written; see `numbered`.
        self.finds = there.made is not None

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.queue.send(self.there.sending(box, tile, self.queue.pool.lender(box, self.largest)), ahead)
        if not ahead:
            self.settle()

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.queue.send(self.there.adding(box, tile, self.queue.pool.lender(box, self.largest)), ahead)
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


#: Makes room for a map on a lower tier; the last arguments say whether it is to be zero, the folder for files, and by
#: which numbers tiles are found.
Room = Callable[[Layout, torch.dtype, torch.device, bool, str | None, Numbered | None], Lower]

#: The lower tiers. A file is zero where nothing was written.
LOWER: Mapping[str, Room] = {
    "host": lambda layout, dtype, device, zero, folder, made: HostMemory(layout, dtype, device, zero, made),
    "disk": lambda layout, dtype, device, zero, folder, made: DiskFile(layout, dtype, device, folder, made),
}


@dataclass(frozen=True)
class Home:
    """Where a map is to be: its tier, and who does the transfers where that is a lower one."""

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
        stand = self.queue.stand
        if stand is not None:
            return LowerMap(stand(layout, dtype, device, self.tier), self.queue)
        return LowerMap(LOWER[self.tier](layout, dtype, device, zero, self.queue.folder, made), self.queue)
