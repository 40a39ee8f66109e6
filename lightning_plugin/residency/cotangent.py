"""The gradient of a stored map while backward collects it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.passes import current_pass
from lightning_plugin.residency.device import DeviceMemory
from lightning_plugin.residency.lane import Lane
from lightning_plugin.residency.states import Life, State
from lightning_plugin.residency.tiers import Home
from lightning_plugin.rules.reductions import wide


class Cotangent:
    """The gradient of a stored map while backward collects it; its home is of the map's tier.

    It is complete only when all consumers have added their part; it is accumulated in float32 or wider. What an earlier
    pass has left is nothing to this one: see [Note: passes] in `passes`.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, home: Home, ledger: Ledger | None = None
    ):
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.home = home
        self.ledger = ledger
        self.life: Life[DeviceMemory | Lane] = Life()
        self.largest = 0
        self.collected_in = -1

    @property
    def begun(self) -> bool:
        """Whether anything was added in the pass under way."""
        if self.life.state is State.HOME and self.collected_in != current_pass():
            self.clear()
        return self.life.state is State.HOME

    def add(self, box: Box, gradient: Tensor, ahead: bool = False) -> None:
        self.room().add(box, gradient, ahead)

    def room(self) -> DeviceMemory | Lane:
        """What holds it, zero until something was added."""
        if not self.begun:
            with watched(self.ledger):
                room = self.home.room(self.layout, wide(self.dtype), self.device, zero=True)
            room.expect(self.largest)
            self.life.to(State.HOME, room)
            self.collected_in = current_pass()
        return self.there

    @property
    def there(self) -> DeviceMemory | Lane:
        if self.life.holder is None:
            raise AssertionError("a cotangent is read before anything was added to it")
        return self.life.holder

    def read(self, box: Box) -> Tensor:
        return self.there.read(box).to(self.dtype)

    def summed(self, boxes: Sequence[Box]) -> Tensor:
        """The sum of several tiles."""
        total = self.read(boxes[0]).clone()
        for box in boxes[1:]:
            total += self.read(box)
        return total

    def fetch(self, box: Box) -> None:
        if self.life.holder is not None:
            self.life.holder.fetch(box)

    def expect(self, largest: int) -> None:
        """How many positions the largest tile has that this pass reads or adds; see [Note: pool] in `pool`."""
        self.largest = largest
        if self.life.holder is not None:
            self.life.holder.expect(largest)

    def rest(self) -> None:
        if self.life.holder is not None:
            self.life.holder.rest()

    def clear(self) -> None:
        if self.life.state is State.HOME:
            self.life.to(State.UNMADE)
