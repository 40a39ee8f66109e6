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

from lightning_plugin.layout import Layout
from lightning_plugin.residency.device import DeviceMemory
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.host import HostMemory
from lightning_plugin.residency.lane import Lane
from lightning_plugin.residency.numbered import Numbered
from lightning_plugin.residency.transfer import Courier, Lower

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
    courier: Courier = field(default_factory=Courier)

    def room(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        zero: bool = False,
        made: Numbered | None = None,
    ) -> DeviceMemory | Lane:
        """Room for a map, of which a lower tier finds some tiles by their numbers."""
        if self.tier == "device":
            return DeviceMemory(layout, dtype, device, zero)
        stand = self.courier.stand
        if stand is not None:
            return Lane(stand(layout, dtype, device, self.tier), self.courier)
        return Lane(LOWER[self.tier](layout, dtype, device, zero, self.courier.folder, made), self.courier)
