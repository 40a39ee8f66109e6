"""Drawn regions as a map of classes that is read box by box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.regions.legend import Legend
from wsi_trainer.regions.raster import Edges, edges_of, fill, touches
from wsi_trainer.regions.region import Region
from wsi_trainer.slide.geometry import SlideTransform


@dataclass(frozen=True, eq=False)
class Painted:
    """A region in pixels of the image, and the value that its pixels get."""

    edges: Edges
    bounds: tuple[float, float, float, float]
    value: int

    def meets(self, box: Box) -> bool:
        """Whether the rectangle about the region and the box have anything in common."""
        left, top, right, bottom = self.bounds
        return bool(left < box.hi[1] and right > box.lo[1] and top < box.hi[0] and bottom > box.lo[0])


class DrawnSource(TileSource):
    """A `TileSource` (1, 1, height, width) of bytes: the place of each pixel's class, or `IGNORED`.

    It holds corners and no pixels. A pixel belongs to the topmost region that holds its centre.
    """

    dtype = torch.uint8

    def __init__(self, regions: Sequence[Painted], ground: int, size: tuple[int, int]) -> None:
        """Keep the regions, from the lowest to the topmost, what is beneath them, and the image's height and width."""
        self.shape = (1, 1, *size)
        self.ground = ground
        self._regions = list(regions)

    @staticmethod
    def of(
        regions: Sequence[Region], legend: Legend, place: SlideTransform, size: tuple[int, int], path: Path
    ) -> DrawnSource:
        """The map of an image that lies so in the slide; the path is that of the regions, for what is said of them."""
        painted = []
        for region, value in legend.painted(regions, path):
            moved = Region(region.name, tuple(place.to_image(ring) for ring in region.rings))
            painted.append(Painted(edges_of(moved.rings), moved.bounds, value))
        return DrawnSource(painted, legend.ground, size)

    def read(self, box: Box) -> Tensor:
        values = np.full(box.extent, self.ground, np.uint8)
        for region in self._regions:
            if region.meets(box):
                values[fill(region.edges, box)] = region.value
        return torch.from_numpy(values)[None, None]

    def constant(self, box: Box) -> Tensor | None:
        value = self.ground
        corner = Box(box.lo, (box.lo[0] + 1, box.lo[1] + 1))
        for region in self._regions:
            if not region.meets(box):
                continue
            if touches(region.edges, box):
                return None
            if fill(region.edges, corner).all():
                value = region.value
        return torch.full((1,), value, dtype=self.dtype)
