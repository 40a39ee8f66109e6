"""A boundary: a map that is stored between the segment that makes it and the segments that read it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.constants import Constants, TileNumbers
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.ops import accumulation_dtype
from lightning_plugin.plan import DEEPEST
from lightning_plugin.private import current_pass
from lightning_plugin.residency.tiers import DeviceMemory, Home, LowerMap


class StoredMap:
    """Data of a map, or of its gradient, in a home.

    Attributes:
        dtype: Type of the tiles that are read; the data may have another.
        data: The memory; None before it is allocated and after it is freed.
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
    def memory(self) -> DeviceMemory | LowerMap:
        if self.data is None:
            raise AssertionError("a stored map, or its cotangent, is used while it has no memory")
        return self.data

    def allocate_at_home(self, dtype: torch.dtype, **how: Any) -> DeviceMemory | LowerMap:
        """Allocate memory, and count it in the ledger."""
        lower = self.home.tier != "device"
        with watched(self.ledger) if lower else nullcontext():
            data = self.home.allocate(self.layout, dtype, self.device, **how)
        if self.ledger is not None and isinstance(data, DeviceMemory):
            self.ledger.count(data.data)
        return data

    @property
    def on_device(self) -> Tensor | None:
        """The tensor that holds the data; None if it is on a lower tier or has no memory."""
        return self.data.data if isinstance(self.data, DeviceMemory) else None

    def read(self, box: Box) -> Tensor:
        return self.memory.read(box).to(self.dtype)

    def prefetch(self, box: Box) -> None:
        """Start to read a box that the next tile needs; see [Note: ahead] in `transfer`."""
        if self.data is not None:
            self.data.prefetch(box)

    def wait(self) -> None:
        """Wait for all transfers of the map."""
        if self.data is not None:
            self.data.wait()


class Cotangent(StoredMap):
    """The gradient of a stored map while backward collects it, on the map's tier, in float32 or wider.

    It is complete when all readers of the map have added their part. Data of an earlier backward pass is discarded: see
    [Note: passes] in `private`.

    Attributes:
        largest: Positions of the largest tile that this pass reads or adds.
        backward_pass: The pass that the data belongs to.
    """

    largest = 0
    backward_pass = -1

    @property
    def is_started(self) -> bool:
        """True if a gradient was added in the current pass."""
        if self.backward_pass != current_pass():
            self.clear()
        return self.data is not None

    def add(self, box: Box, gradient: Tensor, ahead: bool = False) -> None:
        self.allocate().add(box, gradient, ahead)

    def allocate(self) -> DeviceMemory | LowerMap:
        """Return the memory; if there is none, allocate it with zeros."""
        if not self.is_started:
            data = self.allocate_at_home(accumulation_dtype(self.dtype), zero=True)
            data.set_largest_tile(self.largest)
            self.data = data
            self.backward_pass = current_pass()
        return self.memory

    def take(self, data: Tensor) -> None:
        """Take a tensor that a replay has summed in the current pass."""
        self.data = DeviceMemory(self.layout, data)
        self.backward_pass = current_pass()
        if self.ledger is not None:
            self.ledger.count(data)

    def sum_of(self, boxes: Sequence[Box]) -> Tensor:
        """Return the sum of several tiles."""
        total = self.read(boxes[0]).clone()
        for box in boxes[1:]:
            total += self.read(box)
        return total

    def set_largest_tile(self, largest: int) -> None:
        """Announce the positions of the largest tile that this pass reads or adds; see [Note: pool] in `transfer`."""
        self.largest = largest
        if self.data is not None:
            self.data.set_largest_tile(largest)

    def clear(self) -> None:
        self.data = None


class Recomputation(Protocol):
    """Recomputes the data of a dropped map.

    Attributes:
        depth: Depth at which the map is dropped.
    """

    depth: int

    def __call__(self, deepest: int) -> None: ...


class Boundary(StoredMap):
    """A stored map. Its cotangent outlives its data: see [Note: leases] in `execute.function`.

    Attributes:
        half: Store it as bfloat16, if the user allows that loss; its cotangent is float32 or wider.
        constants: Parts that are known to be constant.
        numbered: Tiles with equal contents, by the number of the computation that made them: see [Note: identical
            tiles] in `execute.tile_pass`.
        recompute: Makes the data again, if the map is dropped after forward; see [Note: dropped] in `execute.function`.
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
        numbered: TileNumbers | None = None,
    ):
        super().__init__(layout, dtype, device, home or Home(), ledger)
        self.half = half and dtype.is_floating_point and dtype.itemsize > 2
        self.whole = Box.whole(layout.extent)
        self.cotangent = Cotangent(layout, dtype, device, self.home, ledger)
        self.constants = constants
        self.numbered = numbered
        self.recompute: Recomputation | None = None
        self.allocate()

    def allocate(self) -> None:
        assert self.data is None, "a boundary is allocated twice"
        dtype = torch.bfloat16 if self.half else self.dtype
        self.data = self.allocate_at_home(dtype, numbered=self.numbered)

    @property
    def is_dropped(self) -> bool:
        return self.data is None

    def drop_data(self) -> None:
        """Free the data, which forward needs no longer, if it can be recomputed."""
        if self.recompute is not None:
            self.data = None

    def restore_data(self, deepest: int = DEEPEST) -> None:
        """Recompute the data if it was dropped; other maps that this restores stay if they are dropped no deeper than
        ``deepest`` and this map."""
        if self.is_dropped and self.recompute is not None:
            self.recompute(min(deepest, self.recompute.depth))

    def write(self, boxes: Sequence[Box], tile: Tensor, ahead: bool = False) -> None:
        """Write a tile to all boxes that hold the same; to the first only if the others are found by its number."""
        for box in boxes[:1] if self.memory.finds_by_number else boxes:
            self.memory.write(box, tile, ahead)

    def set_largest_tile(self, largest: int) -> None:
        """Announce the positions of the largest tile that this pass moves; see [Note: pool] in `transfer`."""
        self.memory.set_largest_tile(largest)
        self.cotangent.set_largest_tile(largest)
