"""Outlines from files: GeoJSON of QuPath, XML of ASAP, CAMELYON, ImageScope and HALO, in pixels of level 0.

Files come from anywhere, so they are read with the limits of `io.untrusted`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.errors import SlideError
from wsi_trainer.io.display import clean
from wsi_trainer.io.untrusted import Unreadable, read_json
from wsi_trainer.io.untrusted import read_xml as elements_of
from wsi_trainer.regions.shapes import Ring

log = logging.getLogger("wsi_trainer")

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
        removes: True where it takes away from what was drawn of the same name before it, instead of adding to it.
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


def check_on_slide(regions: Sequence[Region], shape: tuple[int, int], path: Path) -> None:
    """Refuse outlines of which none touches the slide, whose height and width are given; say how many of several do
    not.
    """
    outside = 0
    for region in regions:
        left, top, right, bottom = region.bounds
        outside += right <= 0 or bottom <= 0 or left >= shape[1] or top >= shape[0]
    if outside and outside == len(regions):
        raise RegionsError(
            path,
            f"none of its {outside} outlines touches the slide, which has {shape[1]} x {shape[0]} px: they are of "
            "another slide, or in pixels of another resolution than level 0",
        )
    if outside:
        _say(path, f"{outside} of its {len(regions)} outlines lie outside of the slide")


@cache
def _say(path: Path, text: str) -> None:
    """Warn of what is odd in a file: once, however often it is read."""
    log.warning("%s: %s", clean(path), text)


def _say_passed(path: Path, count: int) -> None:
    if count:
        _say(path, f"passes over {count} points or lines, which cover no pixel; draw a lesion as a polygon")


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


NO_AREA = ("Point", "MultiPoint", "LineString", "MultiLineString")
"""Geometries that cover no pixel, such as a cell that was counted or a line that was measured."""


def read_geojson(path: Path) -> list[Region]:
    """The polygons of the file in the order in which they are written.

    The file holds a FeatureCollection, one feature, a list of features (QuPath writes all three), or bare geometries,
    which have no name.
    """
    try:
        content = read_json(path)
        found = [part for feature, name in geometries(content) for part in _regions(feature, name, path)]
        regions = [part for part in found if isinstance(part, Region)]
        _say_passed(path, len(found) - len(regions))
        return regions
    except RegionsError:
        raise
    except KeyError as error:
        raise RegionsError(path, f"not GeoJSON with polygons: a part of it has no {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RegionsError(path, f"not GeoJSON with polygons ({type(error).__name__}: {error})") from error


def geometries(value: Any) -> Iterator[tuple[Any, str]]:
    """Every geometry with the name of its feature's class."""
    if isinstance(value, list):
        for part in value:
            yield from geometries(part)
    elif not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} where a feature or a geometry is expected")
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


def _regions(geometry: Any, name: str, path: Path) -> Iterator[Region | None]:
    """The polygons of a geometry, and None for what covers no pixel."""
    kind = geometry["type"]
    if kind == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from _regions(part, name, path)
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
        for rings in polygons:
            if rings:  # an empty polygon is valid GeoJSON
                yield Region(name, tuple(ring(points, path) for points in rings))
    elif kind in NO_AREA:
        yield None
    else:
        raise RegionsError(path, f"has a geometry of the type {kind!r}; regions are Polygon or MultiPolygon")


Attributes = Mapping[str, str]

AREAS = frozenset({"polygon", "rectangle", "spline"})
"""Types of ASAP's annotations that have an area; dots and measured lengths are passed over."""
NO_GROUP = ("", "None")
LENGTHS = frozenset({"3", "4", "ruler", "arrow", "pin", "1line"})
"""Types of ImageScope's and HALO's regions without an area: ruler, arrow and the like."""
RECTANGLES, ELLIPSES = frozenset({"1", "rectangle"}), frozenset({"2", "ellipse"})


@dataclass
class Asap:
    """`<Annotation Name Type PartOfGroup>` with `<Coordinate Order X Y>`: ASAP, CAMELYON16 and CAMELYON17.

    The class of a region is its group: `Tumor`, `_0`, `metastases`. One that is in no group has none.
    """

    path: Path
    found: list[Region] = field(default_factory=list)
    passed: int = 0
    """Dots and lengths, which cover no pixel."""
    _name: str = ""
    _kind: str = ""
    _corners: list[tuple[int, str, str]] = field(default_factory=list)

    def start(self, tag: str, its: Attributes) -> None:
        if tag == "Annotation":
            group = its.get("PartOfGroup", "").strip()
            self._name, self._kind = "" if group in NO_GROUP else group, its.get("Type", "Polygon").lower()
            self._corners = []
        elif tag == "Coordinate":
            self._corners.append((int(its["Order"]), its["X"], its["Y"]))

    def end(self, tag: str) -> None:
        if tag == "Annotation" and self._kind not in AREAS:
            self.passed += 1
        elif tag == "Annotation":
            points = [(x, y) for _, x, y in sorted(self._corners, key=lambda corner: corner[0])]
            self.found.append(Region(self._name, (ring(points, self.path),)))


@dataclass
class Layers:
    """`<Annotation Name>` with `<Region NegativeROA>` of vertices with X and Y: Aperio ImageScope and HALO.

    The class of a region is the name of its layer. A region that is marked as negative takes away from its layer.
    """

    path: Path
    found: list[Region] = field(default_factory=list)
    passed: int = 0
    """Lengths, which cover no pixel."""
    _layer: str = ""
    _region: Attributes = field(default_factory=dict)
    _corners: list[tuple[str, str]] = field(default_factory=list)

    def start(self, tag: str, its: Attributes) -> None:
        if tag == "Annotation":
            self._layer = its.get("Name", "").strip()
        elif tag == "Region":
            self._region, self._corners = its, []
        elif tag in ("V", "Vertex"):
            self._corners.append((its["X"], its["Y"]))

    def end(self, tag: str) -> None:
        kind = self._region.get("Type", "0").lower()
        if tag != "Region":
            return
        if kind in LENGTHS:
            self.passed += 1
            return
        if kind in ELLIPSES or (kind in RECTANGLES and len(self._corners) == 2):
            raise RegionsError(
                self.path,
                f"has a region of the type {self._region['Type']}, whose outline is not written; draw it as a polygon",
            )
        negative = self._region.get("NegativeROA", "0").lower() in ("1", "true")
        self.found.append(Region(self._layer, (ring(self._corners, self.path),), negative))


ROOTS: Mapping[str, type[Asap] | type[Layers]] = {"ASAP_Annotations": Asap, "Annotations": Layers}
"""Readers by the first element of a file, which names its tool."""


def read_xml(path: Path) -> list[Region]:
    """The regions of the file in the order in which they are written."""
    reader: Asap | Layers | None = None

    def start(tag: str, its: dict[str, str]) -> None:
        nonlocal reader
        if reader is None:
            if tag not in ROOTS:
                raise RegionsError(path, f"begins with <{tag}>; XML of regions begins with {' or '.join(ROOTS)}")
            reader = ROOTS[tag](path)
        reader.start(tag, its)

    def end(tag: str) -> None:
        if reader is not None:
            reader.end(tag)

    try:
        elements_of(path, start, end)
    except Unreadable as error:
        raise RegionsError(path, error.reason) from error
    except (KeyError, ValueError) as error:
        raise RegionsError(path, f"has a corner without a number ({type(error).__name__}: {error})") from error
    if reader is None:
        return []
    _say_passed(path, reader.passed)
    return reader.found


READERS: Mapping[str, Callable[[Path], list[Region]]] = {
    ".geojson": read_geojson, ".json": read_geojson, ".xml": read_xml, ".annotations": read_xml,
}  # fmt: skip
"""Files of outlines; HALO names its XML .annotations."""


def read_regions(path: Path) -> list[Region]:
    """The regions of a file of outlines."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise RegionsError(path, f"is no file of outlines; these end in {', '.join(READERS)}")
    try:
        return reader(path)
    except OSError as error:
        raise RegionsError(path, f"cannot be read: {error.strerror or error}") from error
