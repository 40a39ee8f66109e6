"""A boundary: a map that is stored between the segment that makes it and the segments that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Constants, Numbered
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.plan import DEEPEST
from lightning_plugin.private import current_pass
from lightning_plugin.residency.tiers import DeviceMemory, Home, LowerMap


class StoredMap:
    """Data of a map, or of its gradient, in a home.

    Attributes:
        dtype: The type of tiles that are read; the data may be of another.
        data: The memory, while there is some.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, home: Home, ledger: Ledger | None = None
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.home = home
        self.ledger = ledger
        self.data: DeviceMemory | LowerMap | None = None

    @property
    def there(self) -> DeviceMemory | LowerMap:
        if self.data is None:
            raise AssertionError("a stored map, or its cotangent, is used when it is not there")
        return self.data

    def read(self, box: Box) -> Tensor:
        return self.there.read(box).to(self.dtype)

    def fetch(self, box: Box) -> None:
        """Begin to read a box that will be asked for; see [Note: ahead] in `transfer`."""
        if self.data is not None:
            self.data.fetch(box)

    def rest(self) -> None:
        """Nothing of the map is on its way any more."""
        if self.data is not None:
            self.data.rest()


class Cotangent(StoredMap):
    """The gradient of a stored map while backward collects it; its home is of the map's tier.

    It is complete only when all consumers have added their part; it is accumulated in float32 or wider. What an earlier
    pass has left is nothing to this one: see [Note: passes] in `private`.
    """

    largest = 0
    collected_in = -1

    @property
    def begun(self) -> bool:
        """True if anything was added in the pass under way."""
        if self.collected_in != current_pass():
            self.clear()
        return self.data is not None

    def add(self, box: Box, gradient: Tensor, ahead: bool = False) -> None:
        self.room().add(box, gradient, ahead)

    def room(self) -> DeviceMemory | LowerMap:
        """Its memory, zero until something was added."""
        if not self.begun:
            with watched(self.ledger):
                room = self.home.room(self.layout, accumulation_dtype(self.dtype), self.device, zero=True)
            room.expect(self.largest)
            self.data = room
            self.collected_in = current_pass()
        return self.there

    def summed(self, boxes: Sequence[Box]) -> Tensor:
        """The sum of several tiles."""
        total = self.read(boxes[0]).clone()
        for box in boxes[1:]:
            total += self.read(box)
        return total

    def expect(self, largest: int) -> None:
        """Positions of the largest tile that this pass reads or adds; see [Note: pool] in `transfer`."""
        self.largest = largest
        if self.data is not None:
            self.data.expect(largest)

    def clear(self) -> None:
        self.data = None


class Maker(Protocol):
    """Makes the data of a dropped map again, from boundaries that are dropped no deeper than the one asked for."""

    depth: int

    def __call__(self, deepest: int) -> None: ...


class Boundary(StoredMap):
    """A stored map. Its cotangent outlives its data: see [Note: leases] in `execute.function`.

    ``half`` keeps it as bfloat16, where the user allows that loss; its cotangent stays float32 or wider.
    ``constants`` is where it is known to be constant, ``made`` which of its tiles one computation has made: see [Note:
    identical tiles] in `execute.tile_pass`.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        home: Home | None = None,
        ledger: Ledger | None = None,
        half: bool = False,
        constants: Constants | None = None,
        made: Numbered | None = None,
    ):
        super().__init__(layout, dtype, device, home or Home(), ledger)
        self.half = half and dtype.is_floating_point and dtype.itemsize > 2
        self.whole = Box.whole(layout.extent)
        self.cotangent = Cotangent(layout, dtype, device, self.home, ledger)
        self.constants = constants
        self.made = made
        #: Makes the data again, where it is let go after forward; see [Note: dropped] in `execute.function`.
        self.recompute: Maker | None = None
        self.make_room()

    def make_room(self) -> None:
        assert self.data is None, "a boundary has room already"
        with watched(self.ledger):
            kind = torch.bfloat16 if self.half else self.dtype
            self.data = self.home.room(self.layout, kind, self.device, made=self.made)

    @property
    def is_dropped(self) -> bool:
        return self.data is None

    def drop_data(self) -> None:
        """Free the data, which forward needs no longer, if it can be recomputed."""
        if self.recompute is not None:
            self.data = None

    def restore_data(self, deepest: int = DEEPEST) -> None:
        """Recompute the data if it was dropped. On the way, no map stays that was dropped deeper than ``deepest``, or
        deeper than this one."""
        if self.is_dropped and self.recompute is not None:
            self.recompute(min(deepest, self.recompute.depth))

    def write(self, boxes: Sequence[Box], tile: Tensor, ahead: bool = False) -> None:
        """Write a tile, to all boxes that hold the same: where tiles are found by their numbers, to the first."""
        for box in boxes[:1] if self.there.finds else boxes:
            self.there.write(box, tile, ahead)

    def expect(self, largest: int) -> None:
        """Positions of the largest tile that this pass moves; see [Note: pool] in `transfer`."""
        self.there.expect(largest)
        self.cotangent.expect(largest)
