"""The regions of a map above a threshold, as polygons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray

from wsi_trainer.explain.regions import Rings, mask_of
from wsi_trainer.places.geojson import PathClass, PathObject

MOST = 1000
"""Regions in one file; those with the largest sums are kept."""


@dataclass(frozen=True)
class Outline:
    """A region and what the map says of it."""

    rings: Rings
    """An outline and its holes, in pixels of the slide."""
    largest: float
    """The largest value in it."""
    share: float
    """Of all that speaks for the class on the slide."""
    at: tuple[float, float]
    """x and y of the centre of the position with the largest value."""


def outlines(values: NDArray[np.float64], stride: int, size: tuple[int, int], threshold: float) -> list[Outline]:
    """The regions above a threshold, the one with the largest share first.

    Args:
        values: The map; what is negative counts as nothing.
        stride: Pixels of the slide for one position.
        size: Height and width of the slide, which no outline leaves.
        threshold: As a share of the largest value.
    """
    positive = np.clip(values, 0, None)
    if not positive.any():
        return []
    padded = np.pad(positive, 1)  # so that a region at the border is closed
    centres = [(np.arange(-1, side + 1) + 0.5) * stride for side in positive.shape]
    contours = contour_generator(centres[1], centres[0], padded, fill_type=FillType.OuterOffset)
    filled: Any = contours.filled(threshold * positive.max(), np.inf)  # its type depends on fill_type
    points, offsets = filled
    found = [
        _outline(_rings(corners, starts), positive, stride, size)
        for corners, starts in zip(points, offsets, strict=True)
        if corners is not None and starts is not None
    ]
    return sorted(found, key=lambda region: -region.share)[:MOST]


def _rings(corners: NDArray[np.float64], starts: NDArray[np.uint32]) -> Rings:
    return [
        [(float(x), float(y)) for x, y in corners[begin:end]]
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def _outline(rings: Rings, positive: NDArray[np.float64], stride: int, size: tuple[int, int]) -> Outline:
    """Looks only at the positions near the region: there may be many, on a large map."""
    corners = np.array(rings[0]) / stride
    left, top = np.floor(corners.min(axis=0)).astype(int).clip(min=0)
    right, bottom = np.ceil(corners.max(axis=0)).astype(int)
    part = positive[top:bottom, left:right]
    moved = [[(x - left * stride, y - top * stride) for x, y in ring] for ring in rings]
    inside = np.where(mask_of([moved], (part.shape[0], part.shape[1]), stride), part, 0)
    row, column = np.unravel_index(inside.argmax(), inside.shape)
    at = (float(left + column + 0.5) * stride, float(top + row + 0.5) * stride)
    clipped = [[(min(max(x, 0.0), size[1]), min(max(y, 0.0), size[0])) for x, y in ring] for ring in rings]
    return Outline(clipped, float(inside.max()), float(inside.sum() / positive.sum()), at)


def objects_of(found: list[Outline], target: PathClass) -> list[PathObject]:
    """Outlines as objects of a file, numbered."""
    return [
        PathObject(
            one.rings, {"largest value": one.largest, "share of the map": one.share}, f"{target.name} {number}", target
        )
        for number, one in enumerate(found, start=1)
    ]
