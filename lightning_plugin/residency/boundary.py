"""A boundary: a map that is stored between the segment that makes it and the segments that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Constants
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.plan import DEEPEST
from lightning_plugin.residency.cotangent import Cotangent
from lightning_plugin.residency.device import DeviceMemory
from lightning_plugin.residency.lane import Lane
from lightning_plugin.residency.numbered import Numbered
from lightning_plugin.residency.states import Life, State
from lightning_plugin.residency.tiers import Home


class Maker(Protocol):
    """Makes the data of a dropped map again, from boundaries that are dropped no deeper than the one asked for."""

    depth: int

    def __call__(self, deepest: int) -> None: ...


class Boundary:
    """A stored map. Its cotangent outlives its data: see [Note: leases] in `execute.function`.

    ``half`` keeps it as bfloat16, where the user allows that loss; its cotangent stays float32 or wider.
    ``constants`` is where it is known to be constant, ``made`` which of its tiles one computation has made: see [Note:
    identical tiles] in `execute.alike`.
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
        self.layout = layout
        self.ledger = ledger
        self.dtype = dtype
        self.half = half and dtype.is_floating_point and dtype.itemsize > 2
        self.whole = Box.whole(layout.extent)
        self.device = device
        self.home = home or Home()
        self.life: Life[DeviceMemory | Lane] = Life()
        self.cotangent = Cotangent(layout, dtype, device, self.home, ledger)
        self.constants = constants
        self.made = made
        #: Makes the data again, where it is let go after forward; see [Note: dropped] in `execute.again`.
        self.again: Maker | None = None
        self.make_room()

    def make_room(self) -> None:
        with watched(self.ledger):
            kind = torch.bfloat16 if self.half else self.dtype
            room = self.home.room(self.layout, kind, self.device, made=self.made)
        self.life.to(State.HOME, room)

    @property
    def gone(self) -> bool:
        return self.life.state is State.UNMADE

    def let_go(self) -> None:
        """Forward needs the map no longer; if it can be made again, its data goes."""
        if self.again is not None and not self.gone:
            self.life.to(State.UNMADE)

    def bring_back(self, deepest: int = DEEPEST) -> None:
        """Backward needs the map, or something on the way to which nothing dropped deeper than ``deepest`` is to stay;
        on the way to this one, nothing dropped deeper than itself is either."""
        if self.gone and self.again is not None:
            self.again(min(deepest, self.again.depth))

    @property
    def there(self) -> DeviceMemory | Lane:
        if self.life.holder is None:
            raise AssertionError("a boundary is used after it was let go")
        return self.life.holder

    def write(self, boxes: Sequence[Box], tile: Tensor, ahead: bool = False) -> None:
        """Write a tile, to all boxes that hold the same: where tiles are found by their numbers, to the first."""
        for box in boxes[:1] if self.there.finds else boxes:
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
        if self.life.holder is not None:
            self.life.holder.rest()
