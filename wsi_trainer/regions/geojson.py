"""GeoJSON as QuPath exports it: polygons with a classification, in pixels of level 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wsi_trainer.foreign import read_json
from wsi_trainer.regions.region import Region, RegionsError, ring

NO_AREA = ("Point", "MultiPoint", "LineString", "MultiLineString")
"""Geometries that cover no pixel, such as a cell that was counted or a line that was measured: they are passed over."""


def read_geojson(path: Path) -> list[Region]:
    """The polygons of the file in the order in which they are written.

    The file holds a FeatureCollection, one feature, a list of features (QuPath writes all three), or bare geometries,
    which have no name.
    """
    try:
        content = read_json(path)
        return [region for feature, name in geometries(content) for region in _regions(feature, name, path)]
    except RegionsError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RegionsError(path, f"not GeoJSON with polygons ({type(error).__name__}: {error})") from error


def geometries(value: Any) -> Iterator[tuple[Any, str]]:
    """Every geometry with the name of its feature's class."""
    if isinstance(value, list):
        for part in value:
            yield from geometries(part)
    elif value["type"] == "FeatureCollection":
        yield from geometries(value["features"])
    elif value["type"] == "Feature":
        if value["geometry"] is not None:
            yield value["geometry"], class_of(value.get("properties") or {})
    else:
        yield value, ""


def class_of(properties: Mapping[str, Any]) -> str:
    """The name of a feature's class; parts of a derived class are joined as QuPath shows them."""
    said = properties.get("classification")
    if isinstance(said, Mapping):
        said = said.get("names") or said.get("name")
    if isinstance(said, list):
        said = ": ".join(map(str, said))
    return "" if said is None else str(said)


def _regions(geometry: Any, name: str, path: Path) -> Iterator[Region]:
    kind = geometry["type"]
    if kind == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from _regions(part, name, path)
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
        for rings in polygons:
            if rings:  # an empty polygon is valid GeoJSON
                yield Region(name, tuple(ring(points, path) for points in rings))
    elif kind not in NO_AREA:
        raise RegionsError(path, f"has a geometry of the type {kind!r}; regions are Polygon or MultiPolygon")
