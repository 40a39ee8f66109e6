"""The outlines of predicted regions, along the borders of pixels, joined where blocks cut them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_trainer.places.geojson import Objects, PathClass, PathObject
from wsi_trainer.slide.geometry import SlideTransform


def pieces(mask: NDArray[np.bool_], corner: tuple[int, ...]) -> list[shapely.Polygon]:
    """The pixels of a block as polygons in pixels of the image: the union of what each row has in one piece.

    Args:
        mask: The pixels.
        corner: Row and column at which the block begins.
    """
    padded = np.pad(mask, ((0, 0), (1, 1))).astype(np.int8)
    turns = np.diff(padded, axis=1)
    rows, starts = np.nonzero(turns == 1)
    _, ends = np.nonzero(turns == -1)
    top, left = corner
    runs = shapely.box(starts + left, rows + top, ends + left, rows + top + 1)
    return polygons_of(shapely.union_all(runs))


def joined(parts: Sequence[shapely.Polygon], least: float = 0.0) -> list[shapely.Polygon]:
    """Regions of the whole image, the largest first, without those of fewer pixels than `least`."""
    found = [polygon for polygon in polygons_of(shapely.union_all(list(parts))) if polygon.area >= least]
    return sorted(found, key=lambda polygon: -polygon.area)


def polygons_of(geometry: Any) -> list[shapely.Polygon]:
    """The polygons of a geometry."""
    return [part for part in shapely.get_parts(geometry) if isinstance(part, shapely.Polygon) and not part.is_empty]


def write_outlines(path: Path, found: Mapping[PathClass, Sequence[shapely.Polygon]], place: SlideTransform) -> None:
    """Write GeoJSON that QuPath imports, in pixels of the slide's level 0: an annotation for each region."""
    objects = (
        PathObject(_rings(polygon), {"pixels": polygon.area}, f"{shown_as.name} {count}", shown_as)
        for shown_as, polygons in found.items()
        for count, polygon in enumerate(polygons, start=1)
    )
    Objects("annotation", path.name, inside=False).write(path, objects, place)


def _rings(polygon: shapely.Polygon) -> list[NDArray[np.float64]]:
    """Without the corners at which nothing turns."""
    return [shapely.get_coordinates(ring.simplify(0)) for ring in (polygon.exterior, *polygon.interiors)]
