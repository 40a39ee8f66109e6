"""A small picture of a slide, made strip by strip from a level that is coarse enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from lightning_plugin import Box, TileSource
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.source import SlideSource

STRIP = 8 << 20
"""About how many pixels are held at a time."""


def thumbnail(source: TileSource, side: int) -> np.ndarray:
    """The image (rows, columns, 3), bytes, shrunk by the smallest whole factor that keeps within `side` pixels."""
    height, width = source.shape[2:]
    factor = max(1, -(-max(height, width) // side))
    rows = factor * max(1, STRIP // (width * factor))
    strips = []
    for top in range(0, height, rows):
        strip = source.read(Box((top, 0), (min(top + rows, height), width))).float()
        strips.append(functional.avg_pool2d(strip, factor, ceil_mode=True, count_include_pad=False).round().byte())
    return np.ascontiguousarray(torch.cat(strips, dim=2)[0].permute(1, 2, 0).numpy())


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
