"""Regions as GeoJSON that QuPath imports, in pixels of level 0 of the original slide."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wsi_trainer.explain.regions import Rings
from wsi_trainer.places import Place

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
class Region:
    """One object of a file."""

    rings: Rings
    """An outline and its holes, x and y in pixels of the image."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True)
class Objects:
    """How all objects of a file are shown, and in what they are counted."""

    kind: Literal["annotation", "tile"]
    shown_as: PathClass | None
    """None leaves objects without a class: tiles are coloured by their measurements."""
    seed: str
    """Other objects have another one: ids are made of it."""

    def write(self, path: Path, regions: Iterable[Region], place: Place) -> int:
        """Write the file, one object a line; returns how many there are.

        Args:
            path: The file.
            regions: What to write, in pixels of an image.
            place: Where that image lies in the slide.
        """
        about = {"pixels": "level 0 of the original slide", "place": place.record()}
        count = 0
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"type": "FeatureCollection", "wsi_trainer": {json.dumps(about)}, "features": [')
            for feature in self._features(regions, place):
                file.write(("," if count else "") + "\n" + json.dumps(feature))
                count += 1
            file.write("\n]}\n")
        return count

    def _features(self, regions: Iterable[Region], place: Place) -> Iterator[dict[str, Any]]:
        for number, region in enumerate(regions, start=1):
            properties: dict[str, Any] = {"objectType": self.kind}
            if region.name is not None:
                properties["name"] = region.name
            if self.shown_as is not None:
                properties["classification"] = {"name": self.shown_as.name, "color": list(self.shown_as.colour)}
            known = {name: value for name, value in region.measurements.items() if math.isfinite(value)}
            yield {
                "type": "Feature",
                "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.seed}#{self.kind}#{number}")),
                "geometry": {"type": "Polygon", "coordinates": [_ring(ring, place) for ring in region.rings]},
                "properties": {**properties, "measurements": known},
            }


def _ring(ring: list[tuple[float, float]], place: Place) -> list[list[float]]:
    """A ring in the slide, which it does not leave: the last pixel of an image may reach over its border."""
    points = np.clip(place.to_slide(ring), 0, place.shape[::-1])
    return [[round(x, _DIGITS), round(y, _DIGITS)] for x, y in points.tolist()]


def rectangle(x: float, y: float, right: float, bottom: float) -> Rings:
    """The outline of a rectangle, closed."""
    return [[(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]]
