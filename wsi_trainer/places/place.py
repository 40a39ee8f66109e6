"""The place of an image in its slide: what turns positions in one into positions in the other.

A position is counted in pixels from the upper left *corner* of the first one, so the centre of the first pixel is at
0.5. QuPath and GeoJSON count like that. Micrometres, as in OME-Zarr, are counted from the *centre* of the slide's
first pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Pair = tuple[float, float]
"""Of the vertical and the horizontal direction, in this order."""


@dataclass(frozen=True)
class Place:
    """Where an image lies in level 0 of the slide that it was made from."""

    shape: tuple[int, int]
    """Height and width of the slide's level 0: of the whole canvas, also where only a part of it was converted."""
    origin: Pair = (0.0, 0.0)
    """The slide's pixels above and left of the image."""
    scale: Pair = (1.0, 1.0)
    """The slide's pixels along one pixel of the image."""
    mpp: Pair | None = None
    """Micrometres for one of the slide's pixels."""
    bounds: tuple[int, int, int, int] | None = None
    """The scanned part of the slide (y, x, height, width), where its file says so: QuPath shows nothing else of it."""

    def __post_init__(self) -> None:
        if min(self.scale) <= 0 or (self.mpp is not None and min(self.mpp) <= 0):
            raise ValueError(f"scale {self.scale} and micrometres {self.mpp} must be above 0")

    def coarser(self, factor: float) -> Place:
        """The place of what is made of this image with one pixel, or one position of a map, for `factor` of its own."""
        return replace(self, scale=(self.scale[0] * factor, self.scale[1] * factor))

    def to_slide(self, points: ArrayLike) -> NDArray[np.float64]:
        """Positions (..., 2) as x and y in the image, as x and y in level 0 of the slide."""
        return np.asarray(points, np.float64) * self.scale[::-1] + self.origin[::-1]

    def to_image(self, points: ArrayLike) -> NDArray[np.float64]:
        """Positions (..., 2) as x and y in level 0 of the slide, as x and y in the image."""
        return (np.asarray(points, np.float64) - self.origin[::-1]) / self.scale[::-1]

    @property
    def unit(self) -> Pair:
        """What one of the slide's pixels counts as in OME-Zarr: micrometres, or 1 where nobody knows them."""
        return self.mpp or (1.0, 1.0)

    def pixel(self) -> Pair:
        """The size of one pixel of the image, y and x in units."""
        return self.scale[0] * self.unit[0], self.scale[1] * self.unit[1]

    def first(self) -> Pair:
        """The centre of the image's first pixel from the centre of the slide's first, y and x in units."""
        y, x = ((start + step / 2 - 0.5) * unit for start, step, unit in zip(self.origin, self.scale, self.unit))
        return y, x

    def record(self) -> dict[str, Any]:
        """What is kept in metadata."""
        return {
            "shape": list(self.shape),
            "origin": list(self.origin),
            "scale": list(self.scale),
            "mpp": None if self.mpp is None else list(self.mpp),
            "bounds": None if self.bounds is None else list(self.bounds),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Place:
        """A place from its record.

        Raises:
            ValueError, KeyError, TypeError: It is none.
        """
        pairs = {key: _numbers(record[key], 2) for key in ("shape", "origin", "scale")}
        mpp, bounds = record.get("mpp"), record.get("bounds")
        height, width = pairs["shape"]
        inside = None if bounds is None else _numbers(bounds, 4)
        return cls(
            shape=(int(height), int(width)),
            origin=(pairs["origin"][0], pairs["origin"][1]),
            scale=(pairs["scale"][0], pairs["scale"][1]),
            mpp=None if mpp is None else (_numbers(mpp, 2)[0], _numbers(mpp, 2)[1]),
            bounds=None if inside is None else (int(inside[0]), int(inside[1]), int(inside[2]), int(inside[3])),
        )


def _numbers(values: Any, count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise ValueError(f"{values!r}: expected {count} numbers")
    return numbers
