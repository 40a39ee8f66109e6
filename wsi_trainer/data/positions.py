"""Files with the positions of patches: HDF5 of CLAM and TRIDENT, GeoJSON of QuPath, CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely.geometry import shape

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import open_hdf5, own
from wsi_trainer.io.tables import read_table
from wsi_trainer.io.untrusted import Unreadable, read_json
from wsi_trainer.regions.outlines import geometries
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.views import Positions
from wsi_trainer.store.identity import plain_name

SAME_SIZE = 0.15
"""By how much of its side a patch may be larger or smaller than a file says: scanners that are all said to have 20x
differ by so much, and the next magnification by a factor of 2.
"""


@dataclass(frozen=True, eq=False)
class Chosen:
    """Patches of one slide, in pixels of its level 0."""

    path: Path
    """The file that says them."""
    points: NDArray[np.float64]
    """x and y of each."""
    middle: bool
    """Whether points are the middles of patches, and not their upper left corners."""
    side: float | None = None
    """Pixels along a side of a patch, where the file says it."""
    slide: tuple[int, int] | None = None
    """Height and width of level 0 of the slide that they were made for, where the file says it."""

    def positions(self, place: SlideTransform, shape: tuple[int, int], size: int) -> Positions:
        """The corners of patches of this size in an image of the slide, their middles where the file has them.

        Raises:
            SlideError: They are of another slide, of another size, or lie outside.
        """
        if not len(self.points):
            raise SlideError(self.path, "has no patches; leave the slide out of the manifest, or choose some")
        if not np.isfinite(self.points).all():
            raise SlideError(self.path, "has a position that is no finite number; give pixels of level 0")
        if self.slide is not None and self.slide != place.shape:
            raise SlideError(
                self.path,
                f"was made for a slide of {self.slide[1]} × {self.slide[0]} pixels, and this one has "
                f"{place.shape[1]} × {place.shape[0]}; is it the file of another slide?",
            )
        own = size * sum(place.scale) / 2
        side = own if self.side is None else self.side
        if abs(side / own - 1) > SAME_SIZE:
            raise SlideError(
                self.path,
                f"has patches of {side:g} pixels of level 0, and those of data.patches (size {size}) have {own:g}; "
                "set data.patches.mpp to the resolution that they were made for, and size to their pixels there",
            )
        middles = self.points if self.middle else self.points + side / 2
        corners = np.floor(place.to_image(middles) - size / 2 + 0.5)[:, ::-1]
        outside = np.any((corners <= -size) | (corners >= shape), axis=1)
        if outside.any():
            x, y = self.points[outside][0]
            raise SlideError(
                self.path,
                f"{int(outside.sum())} of its {len(self.points)} patches lie outside of the slide's image, the first "
                f"at x {x:g}, y {y:g}; give pixels of level 0, from the upper left corner of the slide",
            )
        return corners.astype(np.int32)


MOST = 10_000_000
"""Patches that a slide can have: a file that claims more is damaged."""


def read_coords(path: Path) -> Chosen:
    """The patches of a file, with what its attributes say of their size and of the slide."""
    try:
        with open_hdf5(path) as file:
            found = own(path, file, "coords")
            if not hasattr(found, "dtype"):
                raise SlideError(path, f"has no dataset coords; it has {', '.join(map(str, file)) or 'none'}")
            if found.ndim != 2 or found.shape[1] != 2 or found.shape[0] > MOST or found.dtype.kind not in "iuf":
                raise SlideError(path, f"coords is {found.shape} of {found.dtype}; it must be (patches, 2) of numbers")
            points, attributes = found[()].astype(np.float64), dict(found.attrs)
    except Unreadable as error:
        raise SlideError(path, error.reason) from error
    try:
        return Chosen(path, points, middle=False, side=side_of(path, attributes), slide=slide_of(attributes))
    except (TypeError, ValueError) as error:
        raise SlideError(path, f"an attribute of coords is no number: {error}") from error


def side_of(path: Path, attributes: Mapping[str, Any]) -> float:
    """Pixels of level 0 along a side of a patch: TRIDENT says them, CLAM says those of a level and what it shrinks."""
    if "patch_size_level0" in attributes:
        return _number(attributes["patch_size_level0"])
    if "patch_size" in attributes and "downsample" in attributes:
        return _number(attributes["patch_size"]) * _number(attributes["downsample"])
    if "patch_size" in attributes and "patch_level" in attributes and _number(attributes["patch_level"]) == 0:
        return _number(attributes["patch_size"])
    raise SlideError(
        path,
        "coords says nothing of the size of its patches: there is neither patch_size_level0 (TRIDENT) nor patch_size "
        "with downsample (CLAM); take the file that was written when patches were chosen, not that of features",
    )


def slide_of(attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of level 0 of the slide, which TRIDENT says."""
    if "level0_width" not in attributes or "level0_height" not in attributes:
        return None
    return int(_number(attributes["level0_height"])), int(_number(attributes["level0_width"]))


def _number(value: Any) -> float:
    """An attribute as a number above or equal to 0; of x and y, which a shrunk level has, the mean."""
    number = float(np.mean(np.asarray(value, np.float64)))
    if not 0 <= number < 1e9:
        raise ValueError(f"{value!r}")
    return number


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


def chosen_patches(folder: Path, slide: Path) -> Chosen:
    """Patches from the file of a slide; an error where there is none, or more than one."""
    name = plain_name(slide)
    paths = {folder / ending.format(name): read for ending, read in READERS.items()}
    there = [path for path in paths if path.is_file()]
    if not there:
        raise SlideError(slide, f"data.patches.positions has none of {', '.join(path.name for path in paths)}")
    if len(there) > 1:
        raise SlideError(slide, f"{folder} has {' and '.join(path.name for path in there)}; leave one of them there")
    return paths[there[0]](there[0])


def read_csv(path: Path) -> Chosen:
    """The columns x and y of a table: upper left corners."""
    table = read_table(path)
    table.need("x", "y")
    points = np.empty((len(table.rows), 2))
    for number, (line, row) in enumerate(table.rows):
        try:
            points[number] = float(row["x"]), float(row["y"])
        except ValueError as error:
            raise UserError(f"{path}, line {line}: x is {row['x']!r} and y is {row['y']!r}; give numbers") from error
    return Chosen(path, points, middle=False)


READERS: dict[str, Callable[[Path], Chosen]] = {
    "{}.h5": read_coords,
    "{}_patches.h5": read_coords,
    "{}.geojson": read_outlines,
    "{}.csv": read_csv,
}
"""What reads which file, by its name."""
