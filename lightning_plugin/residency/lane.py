"""The transfers of one map; see [Note: ahead] in `transfer`."""

from __future__ import annotations

from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.residency.pool import Lender
from lightning_plugin.residency.transfer import Arrivals, Courier, Lower, Pending


class Lane:
    """A map on a lower tier, written and read through a courier. ``largest`` are the positions of its largest tile in
    the pass at hand."""

    def __init__(self, there: Lower, courier: Courier) -> None:
        self.largest = 0
        self.there = there
        self.courier = courier
        self.sent: Pending | None = None
        self.fetched: Arrivals[Box] = Arrivals()
        #: Whether a tile for which another stands need not be written; see `numbered`.
        self.finds = there.made is not None

    def write(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.courier.send(self.there.sending(box, tile, self.lender(box)), ahead)
        if not ahead:
            self.settle()

    def add(self, box: Box, tile: Tensor, ahead: bool = False) -> None:
        self.settle()
        self.sent = self.courier.send(self.there.adding(box, tile, self.lender(box)), ahead)
        if not ahead:
            self.settle()

    def fetch(self, box: Box) -> None:
        """Begin to read a box that will be asked for."""
        self.fetched.begin(box, lambda: self.fetching(box, ahead=True))

    def fetching(self, box: Box, ahead: bool) -> Pending:
        return self.courier.send(self.there.fetching(box, self.lender(box)), ahead)

    def read(self, box: Box) -> Tensor:
        """A box, which was fetched, or is read now: after what is on its way there."""
        return self.fetched.take(box, lambda: self.fetching(box, ahead=self.sent is not None))

    def lender(self, box: Box) -> Lender:
        pool = self.courier.pool
        return Lender(pool, box, self.largest if pool.open else 0)

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
