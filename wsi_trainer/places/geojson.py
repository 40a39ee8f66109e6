"""Objects as GeoJSON that QuPath imports, in pixels of level 0 of the original slide."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from wsi_trainer.slide.geometry import SlideTransform

Rings = Sequence[ArrayLike]
"""An outline and its holes, each closed: rows of x and y."""

COLOURS = (
    (44, 160, 44), (200, 30, 30), (31, 119, 180), (255, 127, 14), (148, 103, 189), (140, 86, 75), (227, 119, 194),
    (188, 189, 34), (23, 190, 207), (127, 127, 127),
)  # fmt: skip
"""Of classes, by their place in the task; after the last they begin again."""
_DIGITS = 4
"""Behind the point, of a position: the place of a region is kept to a ten-thousandth of a pixel."""


@dataclass(frozen=True)
class PathClass:
    """A class as QuPath has it."""

    name: str
    colour: tuple[int, int, int]

    @classmethod
    def of(cls, name: str, index: int) -> PathClass:
        """The class with this place in its task."""
        return cls(name, COLOURS[index % len(COLOURS)])


@dataclass(frozen=True)
class PathObject:
    """One object of a file, as QuPath has it."""

    rings: Rings
    """In pixels of the image."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    shown_as: PathClass | None = None
    """None leaves it without a class: tiles are coloured by their measurements."""


@dataclass(frozen=True)
class Objects:
    """What all objects of a file have in common."""

    kind: Literal["annotation", "tile"]
    seed: str
    """Other objects have another one: ids are made of it."""
    inside: bool = True
    """Whether objects end where the slide does: the last pixel of an image may reach over its border. What is read
    again as pixels keeps all of it.
    """

    def write(self, path: Path, objects: Iterable[PathObject], place: SlideTransform) -> int:
        """Write the file, one object a line; returns how many there are.

        Args:
            path: The file.
            objects: What to write, in pixels of an image.
            place: Where that image lies in the slide.
        """
        about = {"pixels": "level 0 of the original slide", "place": place.record()}
        count = 0
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"type": "FeatureCollection", "wsi_trainer": {json.dumps(about)}, "features": [')
            for feature in self._features(objects, place):
                file.write(("," if count else "") + "\n" + json.dumps(feature))
                count += 1
            file.write("\n]}\n")
        return count

    def _features(self, objects: Iterable[PathObject], place: SlideTransform) -> Iterator[dict[str, Any]]:
        for number, one in enumerate(objects, start=1):
            properties: dict[str, Any] = {"objectType": self.kind}
            if one.name is not None:
                properties["name"] = one.name
            if one.shown_as is not None:
                properties["classification"] = {"name": one.shown_as.name, "color": list(one.shown_as.colour)}
            known = {name: value for name, value in one.measurements.items() if math.isfinite(value)}
            yield {
                "type": "Feature",
                "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.seed}#{self.kind}#{number}")),
                "geometry": {"type": "Polygon", "coordinates": [self._ring(ring, place) for ring in one.rings]},
                "properties": {**properties, "measurements": known},
            }

    def _ring(self, ring: ArrayLike, place: SlideTransform) -> list[list[float]]:
        points = place.to_slide(ring)
        if self.inside:
            points = np.clip(points, 0, place.shape[::-1])
        return [[round(x, _DIGITS), round(y, _DIGITS)] for x, y in points.tolist()]


def rectangle(x: float, y: float, right: float, bottom: float) -> list[list[tuple[float, float]]]:
    """The outline of a rectangle, closed."""
    return [[(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]]
