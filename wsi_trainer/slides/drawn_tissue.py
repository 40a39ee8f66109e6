"""A tissue mask that somebody drew, or edited, as GeoJSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_plugin import Box
from wsi_trainer.regions.geojson import read_geojson
from wsi_trainer.regions.raster import edges_of, fill

from .errors import SlideError
from .tissue import REMOVED, TissueMask


def draw_tissue(
    path: Path, shape: tuple[int, int], scale: int, source_scale: tuple[float, float], origin: tuple[int, int] = (0, 0)
) -> TissueMask:
    """A mask from GeoJSON polygons, which hold full-resolution pixels of the slide: all whose centre lies in one.

    Args:
        path: The GeoJSON file.
        shape: Height and width of the mask.
        scale: Pixels of the image along one of the mask.
        source_scale: Pixels of level 0 of the slide along one of the mask, y and x.
        origin: Where in level 0 of the slide the mask begins, y and x.
    """
    regions = [region for region in read_geojson(path) if region.rings]
    if not regions:
        raise SlideError(path, "holds no polygon")
    mask = np.zeros(shape, bool)
    for region in regions:
        if region.name.startswith(REMOVED):
            continue
        edges = edges_of(tuple((ring - origin[::-1]) / source_scale[::-1] for ring in region.rings))
        box = _around(edges, shape)
        (top, left), (bottom, right) = box.lo, box.hi
        if bottom > top and right > left:
            mask[top:bottom, left:right] |= fill(edges, box)
    return TissueMask(mask, scale)


def _around(edges: np.ndarray, shape: tuple[int, int]) -> Box:
    """The part of the mask that the outline can fill."""
    if not len(edges):
        return Box((0, 0), (0, 0))
    ends = edges.reshape(-1, 2)
    low = np.clip(np.floor(ends.min(0)), 0, shape[::-1]).astype(int).tolist()
    high = np.clip(np.ceil(ends.max(0)), 0, shape[::-1]).astype(int).tolist()
    return Box((low[1], low[0]), (high[1], high[0]))
