"""The outlines of predicted regions, along the borders of pixels, joined where blocks cut them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from lightning_plugin import Box
from wsi_trainer.regions import Placement

COLOURS = ((200, 30, 30), (30, 120, 200), (40, 160, 60), (230, 150, 20), (140, 60, 180), (120, 90, 60))
"""Of the classes after the first, in turn."""


def pieces(mask: NDArray[np.bool_], box: Box) -> list[shapely.Polygon]:
    """The pixels of a block as polygons in pixels of the image: the union of what each row has in one piece."""
    padded = np.pad(mask, ((0, 0), (1, 1))).astype(np.int8)
    turns = np.diff(padded, axis=1)
    rows, starts = np.nonzero(turns == 1)
    _, ends = np.nonzero(turns == -1)
    (top, left), _ = box.lo, box.hi
    runs = shapely.box(starts + left, rows + top, ends + left, rows + top + 1)
    return polygons_of(shapely.union_all(runs))


def joined(parts: Sequence[shapely.Polygon], least: float = 0.0) -> list[shapely.Polygon]:
    """Regions of the whole image, the largest first, without those of fewer pixels than `least`."""
    found = [polygon for polygon in polygons_of(shapely.union_all(list(parts))) if polygon.area >= least]
    return sorted(found, key=lambda polygon: -polygon.area)


def polygons_of(geometry: Any) -> list[shapely.Polygon]:
    """The polygons of a geometry."""
    return [part for part in shapely.get_parts(geometry) if isinstance(part, shapely.Polygon) and not part.is_empty]


def write_outlines(
    path: Path,
    found: Mapping[str, Sequence[shapely.Polygon]],
    place: Placement,
    colours: Sequence[tuple[int, int, int]] = COLOURS,
) -> None:
    """Write GeoJSON that QuPath imports, in pixels of the slide's level 0: an annotation for each region."""
    features = [
        _feature(path, name, colours[number % len(colours)], place, polygon, count)
        for number, (name, polygons) in enumerate(found.items())
        for count, polygon in enumerate(polygons, start=1)
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}) + "\n", encoding="utf-8")


def _feature(
    path: Path, name: str, colour: tuple[int, int, int], place: Placement, polygon: shapely.Polygon, count: int
) -> dict[str, Any]:
    rings = [polygon.exterior, *polygon.interiors]
    corners = [place.to_slide(shapely.get_coordinates(ring.simplify(0))).tolist() for ring in rings]
    return {
        "type": "Feature",
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{path.name}#{name}#{count}")),
        "geometry": {"type": "Polygon", "coordinates": corners},
        "properties": {
            "objectType": "annotation",
            "name": f"{name} {count}",
            "classification": {"name": name, "color": list(colour)},
            "measurements": {"pixels": polygon.area},
        },
    }
