"""Where a boundary lives between the segment that makes it and the segments that read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.execute.alike import Constants
from lightning_plugin.execute.disk import DiskFile
from lightning_plugin.execute.host import HostMemory
from lightning_plugin.execute.team import Team
from lightning_plugin.execute.transfer import Courier, Lane
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger, apart, watched
from lightning_plugin.passes import current_pass
from lightning_plugin.plan_fields import DEEPEST
from lightning_plugin.rules.reductions import wide


class Memory:
    """A map on the device: nothing has to be transferred, and a tile that is read is a view."""

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


@dataclass(frozen=True)
class Place:
    """Where a map is to be: its tier, and who does the transfers where that is a lower one."""

    tier: str = "device"
    courier: Courier = field(default_factory=Courier)

    def store(self, layout: Layout, dtype: torch.dtype, device: torch.device, zero: bool = False) -> Memory | Lane:
        """Room for a map."""
        if self.tier == "device":
            return Memory(layout, dtype, device, zero)
        rehearsal = self.courier.rehearsal
        if rehearsal is not None:
            return Lane(rehearsal.away(layout, dtype, device, self.tier), self.courier)
        if self.tier == "disk":
            return Lane(DiskFile(layout, dtype, device, self.courier.folder), self.courier)
        return Lane(HostMemory(layout, dtype, device, zero), self.courier)


class Cotangent:
    """The gradient of a stored map while backward collects it; it lives on the map's tier.

    It is complete only when all consumers have added their part; it is accumulated in float32 or wider. What an earlier
    pass has left is nothing to this one: see [Note: passes] in `passes`.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, place: Place, ledger: Ledger | None = None
    ):
        self.layout = layout
        self.whole = Box.whole(layout.extent)
        self.dtype = dtype
        self.device = device
        self.place = place
        self.ledger = ledger
        self.data: Memory | Lane | None = None
        self.largest = 0
        self.collected_in = -1

    @property
    def begun(self) -> bool:
        """Whether anything was added in the pass under way."""
        if self.data is not None and self.collected_in != current_pass():
            self.clear()
        return self.data is not None

    def add(self, box: Box, gradient: Tensor, ahead: bool = False) -> None:
        self.room().add(box, gradient, ahead)

    def room(self) -> Memory | Lane:
        """What holds it, zero until something was added."""
        if not self.begun:
            with apart(self.ledger):
                self.data = self.place.store(self.layout, wide(self.dtype), self.device, zero=True)
            self.data.expect(self.largest)
            self.collected_in = current_pass()
        assert self.data is not None
        return self.data

    def complete(self, team: Team, boxes: Iterable[Box]) -> None:
        """Add up what the ranks have collected, box by box; see [Note: team] in `team`."""
        data = self.room()
        for box in boxes:
            part = data.read(box).clone(memory_format=torch.contiguous_format)
            team.sum(part)
            data.write(box, part)

    def read(self, box: Box) -> Tensor:
        if self.data is None:
            raise AssertionError("a cotangent is read before anything was added to it")
        return self.data.read(box).to(self.dtype)

    def fetch(self, box: Box) -> None:
        if self.data is not None:
            self.data.fetch(box)

    def expect(self, largest: int) -> None:
        """How many positions the largest tile has that this pass reads or adds; see [Note: pool] in `pool`."""
        self.largest = largest
        if self.data is not None:
            self.data.expect(largest)

    def rest(self) -> None:
        if self.data is not None:
            self.data.rest()

    def clear(self) -> None:
        self.data = None


class Maker(Protocol):
    """Makes the data of a dropped map again, from boundaries that are dropped no deeper than the one asked for."""

    depth: int

    def __call__(self, deepest: int) -> None: ...


class Handle:
    """A stored map. Its cotangent outlives its data: see [Note: leases] in `function`.

    ``half`` keeps it as bfloat16, where the user allows that loss; its cotangent stays float32 or wider.
    ``constants`` is where it is known to be constant: see [Note: identical tiles] in `alike`. ``team`` are the ranks
    that made it together.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        place: Place | None = None,
        ledger: Ledger | None = None,
        half: bool = False,
        constants: Constants | None = None,
        team: Team | None = None,
    ):
        self.layout = layout
        self.ledger = ledger
        self.dtype = dtype
        self.half = half and dtype.is_floating_point and dtype.itemsize > 2
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.place = place or Place()
        self.data: Memory | Lane | None = None
        self.cotangent = Cotangent(layout, dtype, device, self.place, ledger)
        self.constants = constants
        self.team = team
        #: Makes the data again, where it is let go after forward; see [Note: dropped] in `again`.
        self.again: Maker | None = None
        self.make_room()

    def make_room(self) -> None:
        with watched(self.ledger):
            self.data = self.place.store(self.layout, torch.bfloat16 if self.half else self.dtype, self.device)

    @property
    def gone(self) -> bool:
        return self.data is None

    def let_go(self) -> None:
        """Forward needs the map no longer; if it can be made again, its data goes."""
        if self.again is not None:
            self.data = None

    def bring_back(self, deepest: int = DEEPEST) -> None:
        """Backward needs the map, or something on the way to which nothing dropped deeper than ``deepest`` is to stay;
        on the way to this one, nothing dropped deeper than itself is either."""
        if self.gone and self.again is not None:
            self.again(min(deepest, self.again.depth))

    @property
    def there(self) -> Memory | Lane:
        if self.data is None:
            raise AssertionError("a boundary is used after it was let go")
        return self.data

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.there.write(box, tile, ahead)

    def read(self, box: Box) -> Tensor:
        tile = self.there.read(box)
        return tile.to(self.dtype) if self.half else tile

    def fetch(self, box: Box) -> None:
        """Begin to read a box that will be asked for; see [Note: ahead] in `transfer`."""
        self.there.fetch(box)

    def expect(self, largest: int) -> None:
        """How many positions the largest tile has that this pass moves; see [Note: pool] in `pool`."""
        self.there.expect(largest)
        self.cotangent.expect(largest)

    def rest(self) -> None:
        """Nothing of the map is on its way any more."""
        if self.data is not None:
            self.data.rest()
