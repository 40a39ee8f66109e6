"""Patches in GeoJSON, as QuPath writes it: squares, or points in the middle of patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import shapely
from shapely.geometry import shape

from wsi_trainer.data.patches.chosen import Chosen
from wsi_trainer.foreign import read_json
from wsi_trainer.regions.geojson import geometries
from wsi_trainer.slide.errors import SlideError

NEAR = 0.02
"""By how much of their side squares may differ: tools round corners."""


def read_outlines(path: Path) -> Chosen:
    """The middles of all squares and points of a file, and the side of its squares."""
    try:
        content = read_json(path)
        parts = _parts([shape(geometry) for geometry, _ in geometries(content)])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, shapely.errors.ShapelyError) as error:
        raise SlideError(path, f"not GeoJSON with squares or points ({type(error).__name__}: {error})") from error
    kinds = shapely.get_type_id(parts)
    if wrong := [part for part, kind in zip(parts, kinds) if kind not in (0, 3)]:
        raise SlideError(path, f"has a geometry of the type {wrong[0].geom_type}; patches are squares, or points")
    bounds = shapely.bounds(parts).reshape(-1, 4)
    if not np.isfinite(bounds).all():
        raise SlideError(path, "has an empty geometry; patches are squares, or points")
    sides = (bounds[:, 2:] - bounds[:, :2])[kinds == 3]
    side = float(sides.mean()) if len(sides) else None
    if side is not None:
        areas = shapely.area(parts)[kinds == 3]
        odd = (abs(sides - side) > NEAR * side).any(axis=1) | (abs(areas - side**2) > 3 * NEAR * side**2)
        if odd.any():
            x, y = bounds[kinds == 3][odd][0][:2]
            raise SlideError(path, f"the outline at x {x:g}, y {y:g} is no square of {side:g} pixels like the others")
    return Chosen(path, (bounds[:, :2] + bounds[:, 2:]) / 2, middle=True, side=side)


def _parts(found: list[Any]) -> Any:
    """Geometries without those that only hold others, as QuPath writes points that were set together."""
    parts = np.array(found, dtype=object)
    while len(parts) and (shapely.get_type_id(parts) > 3).any():
        parts = shapely.get_parts(parts)
    return parts
