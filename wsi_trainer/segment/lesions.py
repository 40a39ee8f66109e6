"""Lesions that were drawn, detections that were made, and which of them meet.

A lesion is what hangs together of the pixels that are drawn as a class. A detection is a found region, and stands for
the point at which the class is most probable, as CAMELYON16 has it: the lesion that holds the point is detected. A
point that is ignored in what was drawn counts neither way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.ndimage import label, maximum

from lightning_plugin import Box, TileSource
from wsi_trainer.metrics import MISSED, Marks
from wsi_trainer.regions import IGNORED
from wsi_trainer.segment.blocks import blocks_of
from wsi_trainer.segment.outlines import joined, pieces

SIDE = 4096
"""Pixels of a block."""

Points = NDArray[np.float64]
"""Rows of x, y and probability, at centres of pixels."""


def drawn_lesions(drawn: TileSource, classes: int, side: int = SIDE) -> list[list[shapely.Polygon]]:
    """The lesions of each class but the first, in pixels of the image; it is read where a border runs."""
    parts: list[list[shapely.Polygon]] = [[] for _ in range(1, classes)]
    for box in blocks_of(drawn.shape[2], drawn.shape[3], side):
        value = drawn.constant(box)
        if value is None:
            values = drawn.read(box)[0, 0].numpy()
            for place, found in enumerate(parts, start=1):
                found += pieces(values == place, box.lo)
        elif 0 < int(value) < classes:
            (top, left), (bottom, right) = box.lo, box.hi
            parts[int(value) - 1].append(shapely.box(left, top, right, bottom))
    return [joined(found) for found in parts]


def near_joined(
    lesions: Sequence[shapely.Polygon], pixel: tuple[float, float], distance: float
) -> list[shapely.Polygon]:
    """Lesions as CAMELYON16 evaluates them: grown by half the distance, so that those within it are one, and filled.

    Args:
        lesions: Polygons in pixels of the image.
        pixel: Its height and width in micrometres.
        distance: Micrometres.
    """
    size = np.array([pixel[1], pixel[0]])
    grown = [shapely.transform(one, lambda corners: corners * size).buffer(distance / 2, 32) for one in lesions]
    rings = shapely.get_exterior_ring(shapely.get_parts(shapely.union_all(grown)))
    filled = shapely.get_parts(shapely.union_all(shapely.polygons(rings)))  # what lay in a hole is part of it now
    return [shapely.transform(one, lambda corners: corners / size) for one in filled]


def highest(mask: NDArray[np.bool_], probability: NDArray[np.float32], box: Box) -> Points:
    """The most probable pixel of each piece of a block; of several that are, the first row by row."""
    labels, count = label(mask)
    if not count:
        return np.empty((0, 3))
    best = np.concatenate([[np.inf], np.atleast_1d(maximum(probability, labels, np.arange(1, count + 1)))])
    rows, columns = np.nonzero(mask)
    piece = labels[rows, columns]
    equal = np.flatnonzero(probability[rows, columns] == best[piece])
    _, first = np.unique(piece[equal], return_index=True)
    rows, columns = rows[equal[first]], columns[equal[first]]
    return np.stack([columns + box.lo[1] + 0.5, rows + box.lo[0] + 0.5, probability[rows, columns]], axis=1)


def detections(regions: Sequence[shapely.Polygon], points: Points) -> Points:
    """The most probable point of each region, whatever pieces it was found in."""
    which, region = shapely.STRtree(regions).query(shapely.points(points[:, :2]), predicate="intersects")
    x, y, probability = points[which].T
    order = np.lexsort((x, y, -probability, region))
    _, first = np.unique(region[order], return_index=True)
    return points[which[order[first]]]


def marked(lesions: Sequence[shapely.Polygon], found: Points, drawn: TileSource) -> Marks:
    """The lesions with the probability of what was detected in each, and the false positives."""
    scores = np.full(len(lesions), MISSED)
    which, lesion = shapely.STRtree(lesions).query(shapely.points(found[:, :2]), predicate="intersects")
    np.maximum.at(scores, lesion, found[which, 2])
    outside = np.delete(found, which, axis=0)
    return Marks(scores, np.array([p for x, y, p in outside.tolist() if _value(drawn, x, y) != IGNORED], np.float64))


def _value(drawn: TileSource, x: float, y: float) -> int:
    row, column = int(y), int(x)
    return int(drawn.read(Box((row, column), (row + 1, column + 1))))
