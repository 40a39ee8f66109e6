"""How many pixels of a map each class has. The map is never whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource

SIDE = 1024
"""Pixels. A larger box is asked for its one value, and cut in two where it has none; a smaller one is read."""
VALUES = 256
"""Of a byte."""


def counted(source: TileSource, classes: int) -> Iterator[tuple[int, Tensor]]:
    """Box by box its number of pixels, and how many of them each class has; what is ignored is of none."""
    waiting = [Box.whole(source.shape[2:])]
    while waiting:
        box = waiting.pop()
        value = source.constant(box)
        if value is None and max(box.extent) > SIDE:
            waiting += _halves(box)
            continue
        values, times = (source.read(box), 1) if value is None else (value, box.positions)
        found = torch.bincount(values.flatten().long(), minlength=VALUES) * times
        yield box.positions, found[:classes]


def _halves(box: Box) -> list[Box]:
    """The box cut across its longer side, where blocks of a file begin as a rule."""
    axis = box.extent.index(max(box.extent))
    low, high = box.lo[axis], box.hi[axis]
    middle = low + -(-(high - low) // (2 * SIDE)) * SIDE
    return [box.replace(axis, low, middle), box.replace(axis, middle, high)]
