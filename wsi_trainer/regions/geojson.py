"""GeoJSON that QuPath imports, in pixels of level 0 of the original slide."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from shapely import Polygon

from wsi_trainer.regions.shapes import Outline, rings_of
from wsi_trainer.slide.geometry import SlideTransform

COLOURS = (
    (44, 160, 44), (200, 30, 30), (31, 119, 180), (255, 127, 14), (148, 103, 189), (140, 86, 75), (227, 119, 194),
    (188, 189, 34), (23, 190, 207), (127, 127, 127),
)  # fmt: skip
"""Colours of classes, by their place in the task; after the last they begin again."""
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

    rings: Sequence[ArrayLike]
    """An outline and its holes, each closed, in pixels of the image."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    shown_as: PathClass | None = None
    """None leaves it without a class: tiles are coloured by their measurements."""

    def properties(self, kind: str) -> dict[str, Any]:
        """The properties of the feature; measurements that are no number are left out."""
        named: dict[str, Any] = {} if self.name is None else {"name": self.name}
        if self.shown_as is not None:
            named["classification"] = {"name": self.shown_as.name, "color": list(self.shown_as.colour)}
        known = {name: value for name, value in self.measurements.items() if math.isfinite(value)}
        return {"objectType": kind, **named, "measurements": known}


def write_objects(
    path: Path, objects: Iterable[PathObject], place: SlideTransform, seed: str, *, tiles: bool = False,
    inside: bool = True,
) -> int:  # fmt: skip
    """Write a file, one object a line; returns how many there are.

    Args:
        path: The file.
        objects: The objects, in pixels of an image.
        place: Position of that image in the slide.
        seed: Ids are made of it: other objects have another one.
        tiles: True for QuPath's tiles, False for annotations.
        inside: Cut objects at the border of the slide, over which the last pixel of an image may reach. Objects that
            are read again as pixels keep all of it.
    """
    about = {"pixels": "level 0 of the original slide", "place": place.record()}
    kind = "tile" if tiles else "annotation"
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"type": "FeatureCollection", "wsi_trainer": {json.dumps(about)}, "features": [')
        for count, one in enumerate(objects, start=1):
            identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{seed}#{kind}#{count}"))
            rings = [_in_slide(ring, place, inside) for ring in one.rings]
            feature = {"type": "Feature", "id": identity, "geometry": {"type": "Polygon", "coordinates": rings}}
            file.write(("," if count > 1 else "") + "\n" + json.dumps(feature | {"properties": one.properties(kind)}))
        file.write("\n]}\n")
    return count


def _in_slide(ring: ArrayLike, place: SlideTransform, inside: bool) -> list[list[float]]:
    points = place.to_slide(ring)
    if inside:
        points = np.clip(points, 0, place.shape[::-1])
    return [[round(x, _DIGITS), round(y, _DIGITS)] for x, y in points.tolist()]


def write_outlines(path: Path, found: Mapping[PathClass, Sequence[Polygon]], place: SlideTransform) -> None:
    """Write the polygons of each class as annotations, with their pixels, each named by its class and a number."""
    objects = (
        PathObject(rings_of(polygon), {"pixels": polygon.area}, f"{shown_as.name} {count}", shown_as)
        for shown_as, polygons in found.items()
        for count, polygon in enumerate(polygons, start=1)
    )
    write_objects(path, objects, place, path.name, inside=False)


def objects_of(found: Sequence[Outline], target: PathClass) -> list[PathObject]:
    """Outlines of a map as numbered objects."""
    return [
        PathObject(
            one.rings, {"largest value": one.largest, "share of the map": one.share}, f"{target.name} {number}", target
        )
        for number, one in enumerate(found, start=1)
    ]


def rectangle(x: float, y: float, right: float, bottom: float) -> list[list[tuple[float, float]]]:
    """The outline of a rectangle, closed."""
    return [[(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]]
