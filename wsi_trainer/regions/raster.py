"""Which pixels of a box lie in a region: those whose centre does.

No library at hand fills polygons by this rule and box by box alike. Pillow and OpenCV also take the pixels that an
outline touches, so that regions grow by half a pixel and two neighbours overlap; scikit-image and matplotlib ask each
pixel against each corner. GDAL does it right, and would be the largest dependency of the project. So the crossings of
each row with the outline are found, and counted from left to right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_plugin import Box
from wsi_trainer.regions.region import Ring

Edges = NDArray[np.float64]
"""Rows of x and y of the one end, x and y of the other, of which the second lies lower; none is level."""


def edges_of(rings: tuple[Ring, ...]) -> Edges:
    """All edges of the rings that a row can cross."""
    sides = [np.concatenate([ring, np.roll(ring, -1, axis=0)], axis=1) for ring in rings]
    edges = np.concatenate(sides)
    edges = edges[edges[:, 1] != edges[:, 3]]
    upward = edges[:, 1] > edges[:, 3]
    edges[upward] = edges[upward][:, [2, 3, 0, 1]]
    return edges


def fill(edges: Edges, box: Box) -> NDArray[np.bool_]:
    """The pixels of a box whose centre has an odd number of crossings to its left.

    The sum is that of the pixel's place in the whole map, so that a box is to the bit the cut-out of a larger one. An
    edge takes its upper end and not its lower one, so that a corner is crossed once.
    """
    (top, left), (bottom, right) = box.lo, box.hi
    rows, columns = bottom - top, right - left
    x0, y0, x1, y1 = edges[(edges[:, 3] > top) & (edges[:, 1] < bottom)].T
    first = np.clip(np.ceil(y0 - 0.5), top, bottom).astype(np.int64)
    beyond = np.clip(np.ceil(y1 - 0.5), top, bottom).astype(np.int64)
    crossed = np.maximum(beyond - first, 0)
    which = np.repeat(np.arange(len(crossed)), crossed)
    row = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(crossed) - crossed, crossed)
    slope = (x1 - x0) / (y1 - y0)
    x = x0[which] + (row + 0.5 - y0[which]) * slope[which]
    column = np.clip(np.ceil(x - 0.5), left, right).astype(np.int64) - left
    turns = np.zeros((rows, columns + 1), np.uint8)
    np.bitwise_xor.at(turns, (row - top, column), 1)
    return np.bitwise_xor.accumulate(turns, axis=1)[:, :columns].astype(bool)


def touches(edges: Edges, box: Box) -> bool:
    """Whether an edge may pass through the box; where none does, all of its pixels are in or all are out."""
    (top, left), (bottom, right) = box.lo, box.hi
    x0, x1 = edges[(edges[:, 3] > top) & (edges[:, 1] < bottom)][:, [0, 2]].T
    return bool(((np.maximum(x0, x1) >= left) & (np.minimum(x0, x1) <= right)).any())
