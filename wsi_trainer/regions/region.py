"""One drawn region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.slide.errors import SlideError

Ring = NDArray[np.float64]
"""Corners as rows of x and y; the last is joined to the first."""

FARTHEST = 1e8
"""Pixels; no slide reaches so far."""


class RegionsError(SlideError):
    """A file of regions that cannot be read, or that does not say what is needed."""


@dataclass(frozen=True, eq=False)
class Region:
    """An area with the name of its class, in pixels of the slide's level 0.

    Attributes:
        name: As the file writes it; empty where the region was given no class.
        rings: Outlines and holes alike: a point lies in the region if a ray from it crosses them an odd number of
            times. So a hole is a ring within a ring, and an outline that crosses itself needs no mending.
        removes: Whether it takes away from what was drawn of the same name before it, instead of adding to it.
    """

    name: str
    rings: tuple[Ring, ...]
    removes: bool = False

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """The least x and y, and the largest."""
        corners = np.concatenate(self.rings)
        (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
        return float(left), float(top), float(right), float(bottom)


def ring(points: Iterable[Iterable[object]], path: Path) -> Ring:
    """The corners of a ring; a third number of a point is a height, which slides do not have."""
    try:
        corners = np.array([[float(value) for value in list(point)[:2]] for point in points], np.float64)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RegionsError(path, f"a corner of a region is no pair of numbers: {error}") from error
    if len(corners) < 3 or corners.shape[1:] != (2,):
        raise RegionsError(path, f"an outline has {len(corners)} corners; it needs 3 or more, each an x and a y")
    if not np.abs(corners).max() <= FARTHEST:  # also refuses what is not a number
        raise RegionsError(path, "a corner of a region lies beyond any slide; coordinates are pixels of level 0")
    return corners
