"""XML of annotation tools: ASAP and CAMELYON, and Aperio ImageScope and HALO, in pixels of level 0.

Files come from anywhere, so they are read as a stream of elements by the door for XML of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.foreign import Unreadable
from wsi_trainer.foreign.xml import read_xml as elements_of
from wsi_trainer.regions.region import Region, RegionsError, ring

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
        if tag == "Annotation" and self._kind in AREAS:
            points = [(x, y) for _, x, y in sorted(self._corners, key=lambda corner: corner[0])]
            self.found.append(Region(self._name, (ring(points, self.path),)))


@dataclass
class Layers:
    """`<Annotation Name>` with `<Region NegativeROA>` of vertices with X and Y: Aperio ImageScope and HALO.

    The class of a region is the name of its layer. A region that is marked as negative takes away from its layer.
    """

    path: Path
    found: list[Region] = field(default_factory=list)
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
        if tag != "Region" or kind in LENGTHS:
            return
        if kind in ELLIPSES or (kind in RECTANGLES and len(self._corners) == 2):
            raise RegionsError(
                self.path,
                f"has a region of the type {self._region['Type']}, whose outline is not written; draw it as a polygon",
            )
        negative = self._region.get("NegativeROA", "0").lower() in ("1", "true")
        self.found.append(Region(self._layer, (ring(self._corners, self.path),), negative))


ROOTS: Mapping[str, type[Asap] | type[Layers]] = {"ASAP_Annotations": Asap, "Annotations": Layers}
"""What the first element of a file says of its tool."""


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
    return reader.found if reader else []
