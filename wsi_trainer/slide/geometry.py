"""Coordinates of an image in its slide, and the size of a pixel of a slide, which `Slide.resolution` has for all.

A position is counted in pixels from the upper left *corner* of the first one, so the centre of the first pixel is at
0.5. QuPath and GeoJSON count like that. Micrometres, as in OME-Zarr, are counted from the *centre* of the slide's
first pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wsi_trainer.errors import AbsentResolution, SlideError, UnknownResolution
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.formats.base import PLAUSIBLE, SlideInfo, is_plausible

Pair = tuple[float, float]
"""A number for the vertical and one for the horizontal direction, in this order."""


@dataclass(frozen=True)
class SlideTransform:
    """Maps pixel coordinates of an image to level 0 of its slide, and back; and to micrometres."""

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

    def coarser(self, factor: float) -> SlideTransform:
        """The place of what is made of this image with one pixel, or one position of a map, for `factor` of its own."""
        return self.scaled(factor, factor)

    def scaled(self, y: float, x: float) -> SlideTransform:
        """The same with as many pixels of this image along one, in each direction."""
        return replace(self, scale=(self.scale[0] * y, self.scale[1] * x))

    def to_slide(self, points: ArrayLike) -> NDArray[np.float64]:
        """Positions (..., 2) as x and y in the image, as x and y in level 0 of the slide."""
        return np.asarray(points, np.float64) * self.scale[::-1] + self.origin[::-1]

    def to_image(self, points: ArrayLike) -> NDArray[np.float64]:
        """Positions (..., 2) as x and y in level 0 of the slide, as x and y in the image."""
        return (np.asarray(points, np.float64) - self.origin[::-1]) / self.scale[::-1]

    @property
    def unit(self) -> Pair:
        """The size of one of the slide's pixels in OME-Zarr: micrometres, or 1 where nobody knows them."""
        return self.mpp or (1.0, 1.0)

    def pixel(self) -> Pair:
        """The size of one pixel of the image, y and x in units."""
        return self.scale[0] * self.unit[0], self.scale[1] * self.unit[1]

    def first(self) -> Pair:
        """The centre of the image's first pixel from the centre of the slide's first, y and x in units."""
        y, x = ((start + step / 2 - 0.5) * unit for start, step, unit in zip(self.origin, self.scale, self.unit))
        return y, x

    def record(self) -> dict[str, Any]:
        """The entries that metadata keep."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SlideTransform:
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


PROVENANCE = "wsi_trainer"
"""The attribute of a store beside `ome` that says where it comes from and how it was made."""
KEY = "place"
"""The key of the transform in it."""


def place_of_store(path: Path) -> SlideTransform:
    """The place of level 0 of a store in the slide that it was made from.

    A store that says nothing of a slide is itself the slide.

    Raises:
        SlideError: Its zarr.json says something that cannot be understood.
    """
    try:
        attributes = read_json(path / "zarr.json")["attributes"]
        scales = attributes["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"]
        mpp = (float(scales[-2]), float(scales[-1]))
        known = attributes.get(PROVENANCE) or {}
        if KEY in known:
            return SlideTransform.of(known[KEY])
        shape = read_json(path / "0" / "zarr.json")["shape"][-2:]
        if "source_mpp" in known:
            raise KeyError(KEY)
        return SlideTransform((int(shape[0]), int(shape[1])), mpp=mpp)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise SlideError(
            path, "damaged: zarr.json does not say where in the slide the store lies; convert the slide again"
        ) from error


def is_painted(store: Path) -> bool:
    """True for a store that was made with `--background constant`; `place_of_store` has read its attributes before."""
    known = read_json(store / "zarr.json")["attributes"].get(PROVENANCE) or {}
    return bool(dict(known.get("settings") or {}).get("background") == "constant")


TOLERANCE = 0.02
"""A slide within this of the wanted resolution is taken as it is: filtering would only blur it."""


@dataclass(frozen=True)
class Resolution:
    """Micrometres per pixel, and where the numbers come from."""

    y: float
    x: float
    origin: str
    """explicit, manifest, store or metadata."""

    @property
    def mean(self) -> float:
        return (self.y + self.x) / 2

    @property
    def is_square(self) -> bool:
        """True if pixels are as high as wide."""
        return abs(self.y / self.x - 1) <= TOLERANCE

    def coarser(self, y: float, x: float) -> Resolution:
        """That of an image with so many of these pixels along one, in each direction."""
        return Resolution(self.y * y, self.x * x, self.origin)


def resolve(path: Path | str, info: SlideInfo, given: float | None, origin: str) -> Resolution:
    """The resolution of level 0 of a slide: what was given for it, else what its file says.

    Args:
        path: Named in the error.
        info: Facts from the file.
        given: Micrometres per pixel.
        origin: Who gave them.

    Raises:
        UnknownResolution: Nothing plausible is known.
    """
    if given is not None:
        if not is_plausible(given):
            raise UnknownResolution(path, f"mpp {given:g} ({origin}) is implausible; {_expected()}")
        return Resolution(given, given, origin)
    way_out = "add a column mpp to the manifest or give --source-mpp"
    if info.mpp is None and info.unreadable is not None:
        raise UnknownResolution(path, f"the file says {info.unreadable!r} of the size of a pixel; {way_out}")
    if info.mpp is None:
        raise UnknownResolution(path, f"the file does not say how large a pixel is; {way_out}")
    if not all(map(is_plausible, info.mpp)):
        found = f"{info.mpp[0]:g} x {info.mpp[1]:g} µm"
        raise UnknownResolution(path, f"the file says that a pixel is {found}, {_expected()}; {way_out}")
    return Resolution(*info.mpp, "metadata")


def _expected() -> str:
    return f"which is not between {PLAUSIBLE[0]:g} and {PLAUSIBLE[1]:g} µm"


def factors_to(path: Path | str, own: Resolution, wanted: float) -> Pair:
    """Pixels of level 0, y and x, along one pixel of the wanted resolution, which is square also where they are not."""
    if own.is_square:
        factor = _factor(path, own.mean, wanted)
        return factor, factor
    return _factor(path, own.y, wanted), _factor(path, own.x, wanted)


def _factor(path: Path | str, side: float, wanted: float) -> float:
    """Pixels along one of the wanted size; 1 where their own is near enough."""
    if abs(wanted / side - 1) <= TOLERANCE:
        return 1.0
    if wanted < side:
        raise AbsentResolution(path, f"has {side:g} µm a pixel; mpp {wanted:g} is finer and would invent pixels")
    return wanted / side
