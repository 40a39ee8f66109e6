"""Thumbnails of slides, read box by box from a level that is coarse enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.nn import functional

from lightning_plugin import Box, TileSource
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.readers.protocol import Pixels
from wsi_trainer.slides.source import SlideSource

HELD = 1 << 22
"""About how many pixels are held at a time."""


def thumbnail(source: TileSource, side: int) -> Pixels:
    """The image (rows, columns, 3), bytes, shrunk by the smallest whole factor that keeps within `side` pixels."""
    return shrunk(source, max(1, -(-max(source.shape[2:]) // side)))


def shrunk(source: TileSource, factor: int) -> Pixels:
    """The means (rows, columns, 3) over squares of `factor` pixels, read box by box.

    At the right and at the bottom they are over what is there.
    """
    height, width = source.shape[2:]
    out = np.empty((-(-height // factor), -(-width // factor), 3), np.uint8)
    columns = max(1, min(out.shape[1], HELD // factor**2))
    rows = max(1, HELD // (factor**2 * columns))
    for top in range(0, out.shape[0], rows):
        for left in range(0, out.shape[1], columns):
            ends = min((top + rows) * factor, height), min((left + columns) * factor, width)
            box = source.read(Box((top * factor, left * factor), ends)).float()
            means = functional.avg_pool2d(box, factor, ceil_mode=True, count_include_pad=False).round().byte()
            out[top : top + rows, left : left + columns] = means[0].permute(1, 2, 0).numpy()
    return out


def coarsest(path: Path, side: int) -> TileSource:
    """The coarsest level of the slide that has at least `side` pixels along its longer side, else the finest."""
    source, level = SlideSource(path), 0
    while True:
        level += 1
        try:
            coarser = SlideSource(path, level=level)
        except SlideError:  # there is no such level
            return source
        if max(coarser.shape[2:]) < side:
            return source
        source = coarser
