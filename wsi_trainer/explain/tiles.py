"""A map in tiles with measurements: QuPath colours such objects by any of these (*Measure > Show measurement maps*)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.places.geojson import PathObject, rectangle
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Image


def positions_with_tissue(image: Image, stride: int, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Which positions of a map stand for tissue; all of them where none is found."""
    tissue = image.tissue()
    return with_tissue(tissue, stride, shape, image.size) if tissue.mask.any() else np.ones(shape, dtype=bool)


def with_tissue(tissue: TissueMask, stride: int, shape: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The positions that have tissue in one pixel at least, from the mask as coarse as it is: an image is large.

    Args:
        tissue: The mask of an image.
        stride: Pixels of the image for one position.
        shape: Rows and columns of the map.
        size: Height and width of the image.
    """
    found = tissue.mask
    for axis in (0, 1):
        starts = np.arange(shape[axis]) * stride
        ends = np.minimum(starts + stride, size[axis])
        first = np.minimum(starts // tissue.scale, found.shape[axis] - 1)  # a mask may be a pixel short
        last = np.minimum(-(-ends // tissue.scale), found.shape[axis])
        sums = np.cumsum(found, axis=axis, dtype=np.int32)
        sums = np.concatenate([np.zeros_like(np.take(sums, [0], axis)), sums], axis)
        found = np.take(sums, last, axis) > np.take(sums, first, axis)
    return found


def side_of_tiles(wanted: NDArray[np.bool_], most: int) -> int:
    """Positions along a tile: 1, or as many as it takes to have no more than `most` tiles."""
    side = 1
    while int(_any(wanted, side).sum()) > most:
        side += 1
    return side


def tiles(
    values: NDArray[np.float64], stride: int, size: tuple[int, int], wanted: NDArray[np.bool_], most: int
) -> Iterator[PathObject]:
    """The tiles of a map, row by row.

    Args:
        values: The map.
        stride: Pixels of the image for one position.
        size: Height and width of the image, which no tile leaves.
        wanted: The positions that count. A tile has at least one, and its numbers are of these only.
        most: How many tiles there may be; where a map has more positions, a tile is several of them a side.
    """
    side = side_of_tiles(wanted, most)
    largest = float(np.max(values, where=wanted, initial=0))
    for row, column in np.argwhere(_any(wanted, side)).tolist():
        part = (slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side))
        inside = values[part][wanted[part]]
        measured = {"mean value": float(inside.mean()), "largest value": float(inside.max())}
        if largest > 0:
            measured["share of the largest"] = max(0.0, measured["largest value"] / largest)
        step = side * stride
        right, bottom = min((column + 1) * step, size[1]), min((row + 1) * step, size[0])
        yield PathObject(rectangle(column * step, row * step, right, bottom), measured)


def _any(wanted: NDArray[np.bool_], side: int) -> NDArray[np.bool_]:
    starts = [np.arange(0, length, side) for length in wanted.shape]
    return np.logical_or.reduceat(np.logical_or.reduceat(wanted, starts[0], axis=0), starts[1], axis=1)
