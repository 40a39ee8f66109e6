"""Polygons as masks and masks as polygons, box by box.

No library at hand fills polygons by the rule that a pixel belongs to the region which holds its centre, and box by box
alike. Pillow and OpenCV also take the pixels that an outline touches, so that regions grow by half a pixel and two
neighbours overlap; scikit-image and matplotlib ask each pixel against each corner. GDAL does it right, and would be the
largest dependency of the project. So the crossings of each row with the outline are found, and counted from left to
right. Outlines of masks are shapely's, contours of maps contourpy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import shapely
from contourpy import FillType, contour_generator
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lightning_plugin import Box

Ring = NDArray[np.float64]
"""Corners as rows of x and y; the last is joined to the first."""
Rings = Sequence[Ring]
"""An outline and its holes."""
Edges = NDArray[np.float64]
"""Rows of x and y of the one end, x and y of the other, of which the second lies lower; none is level."""
Mask = NDArray[np.bool_]
MOST = 1000
"""Outlines of a map; those with the largest sums are kept."""


# Polygons as masks.


def edges_of(rings: Rings) -> Edges:
    """All edges of the rings that a row can cross."""
    edges = np.concatenate([np.concatenate([ring, np.roll(ring, -1, axis=0)], axis=1) for ring in rings])
    edges = edges[edges[:, 1] != edges[:, 3]]
    upward = edges[:, 1] > edges[:, 3]
    edges[upward] = edges[upward][:, [2, 3, 0, 1]]
    return edges


def fill(edges: Edges, lo: Sequence[int], hi: Sequence[int]) -> Mask:
    """The pixels between two corners whose centre has an odd number of crossings to its left.

    The sum is that of the pixel's position in the whole map, so that a box is to the bit the cut-out of a larger one.
    An edge takes its upper end and not its lower one, so that a corner is crossed once.
    """
    (top, left), (bottom, right) = lo, hi
    rows, columns = bottom - top, right - left
    x0, y0, x1, y1 = edges[(edges[:, 3] > top) & (edges[:, 1] < bottom)].T
    first = np.clip(np.ceil(y0 - 0.5), top, bottom).astype(np.int64)
    beyond = np.clip(np.ceil(y1 - 0.5), top, bottom).astype(np.int64)
    crossed = np.maximum(beyond - first, 0)
    which = np.repeat(np.arange(len(crossed)), crossed)
    row = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(crossed) - crossed, crossed)
    slope = (x1 - x0) / (y1 - y0)
    x = x0[which] + (row + 0.5 - y0[which]) * slope[which]
    column = np.clip(np.ceil(x - 0.5), left, right).astype(np.int64) - left
    turns = np.zeros((rows, columns + 1), np.uint8)
    np.bitwise_xor.at(turns, (row - top, column), 1)
    return np.bitwise_xor.accumulate(turns, axis=1)[:, :columns].astype(bool)


def touches(edges: Edges, box: Box) -> bool:
    """True where an edge may pass through the box; else all of its pixels are in or all are out."""
    (top, left), (bottom, right) = box.lo, box.hi
    x0, x1 = edges[(edges[:, 3] > top) & (edges[:, 1] < bottom)][:, [0, 2]].T
    return bool(((np.maximum(x0, x1) >= left) & (np.minimum(x0, x1) <= right)).any())


def mask_of(regions: Iterable[Rings], shape: tuple[int, int], stride: int) -> Mask:
    """The positions of a map of this shape whose centre lies in one of the regions, which are in pixels."""
    mask = np.zeros(shape, dtype=bool)
    for rings in regions:
        edges = edges_of([np.asarray(ring) / stride for ring in rings])
        ends = edges.reshape(-1, 2)[:, ::-1]
        if len(ends):
            lo = np.clip(np.floor(ends.min(axis=0)).astype(int), 0, shape).tolist()
            hi = np.clip(np.ceil(ends.max(axis=0)).astype(int), lo, shape).tolist()
            mask[lo[0] : hi[0], lo[1] : hi[1]] |= fill(edges, lo, hi)
    return mask


# Masks as polygons.


def pieces(mask: Mask, corner: tuple[int, ...]) -> list[shapely.Polygon]:
    """The pixels of a block as polygons in pixels of the image: the faces of the edges between inside and outside.

    Args:
        mask: The pixels.
        corner: Row and column at which the block begins.
    """
    padded = np.pad(mask, 1)
    left, right = padded[:, :-1], padded[:, 1:]
    one, other = left[:-1], right[:-1]
    meets = (one == right[1:]) & (other == left[1:]) & (one != other)  # corners at which two pixels touch
    level = _straight(padded[:-1, 1:-1] != padded[1:, 1:-1], meets)
    upright = _straight((left != right)[1:-1].T, meets.T)[..., ::-1]
    faces = shapely.get_parts(shapely.polygonize(shapely.linestrings(np.concatenate([level, upright]).astype(float))))
    corners, which = shapely.get_coordinates(shapely.get_exterior_ring(faces), return_index=True)
    order = np.lexsort((corners[:, 1], corners[:, 0], which))
    x, y = corners[order[np.searchsorted(which[order], np.arange(len(faces)))]].astype(int).T
    inside = faces[mask[y, x]]  # at the upper end of a face's leftmost edge, the pixel to the right is in it
    return list(shapely.transform(inside, lambda points: points + corner[::-1]))


def _straight(edges: Mask, meets: Mask) -> NDArray[np.int64]:
    """The ends, as x and y, of rows of edges without a corner at which four edges meet."""
    here = np.pad(edges, ((0, 0), (1, 1)))
    before, after = here[:, :-1], here[:, 1:]
    row, first = np.nonzero(after & (~before | meets))
    last = np.nonzero(before & (~after | meets))[1]
    return np.stack([np.stack([first, row], axis=-1), np.stack([last, row], axis=-1)], axis=1)


def joined(parts: Sequence[shapely.Polygon], least: float = 0.0) -> list[shapely.Polygon]:
    """Regions of the whole image, the largest first, without those of fewer pixels than `least`.

    Pieces of one block touch at corners at most; those of two blocks that have an edge in common are one region.
    """
    given = np.array(parts, dtype=object)
    one, other = shapely.STRtree(given).query(given, predicate="intersects")
    one, other = one[one < other], other[one < other]
    joins = ~shapely.relate_pattern(given[one], given[other], "F***0****")
    several = np.zeros(len(given), dtype=bool)
    several[one[joins]] = several[other[joins]] = True
    found = [*given[~several], *polygons_of(shapely.union_all(given[several]))]
    return sorted((polygon for polygon in found if polygon.area >= least), key=lambda polygon: -polygon.area)


def polygons_of(geometry: Any) -> list[shapely.Polygon]:
    """The polygons of a geometry."""
    return [part for part in shapely.get_parts(geometry) if isinstance(part, shapely.Polygon) and not part.is_empty]


def regions_joined(regions: Iterable[Rings]) -> list[shapely.Polygon]:
    """Drawn regions as polygons, those that overlap as one."""
    drawn = shapely.union_all([shapely.make_valid(shapely.Polygon(outer, holes)) for outer, *holes in regions])
    return [part for part in shapely.get_parts(drawn) if part.area]


def rings_of(polygon: shapely.Polygon) -> list[Ring]:
    """The outline and the holes of a polygon, without the corners at which nothing turns."""
    return [shapely.get_coordinates(ring.simplify(0)) for ring in (polygon.exterior, *polygon.interiors)]


def hits(regions: Sequence[Any], shapes: Any, values: NDArray[np.float64], missed: float) -> tuple[Any, Any]:
    """The largest value of the shapes that meet each region, `missed` where none does, and which shapes meet none."""
    which, region = shapely.STRtree(regions).query(shapes, predicate="intersects")
    largest = np.full(len(regions), missed)
    np.maximum.at(largest, region, values[which])
    return largest, np.delete(np.arange(len(values)), which)


# Contours of maps.


@dataclass(frozen=True)
class Outline:
    """A region of a map above a threshold."""

    rings: Rings
    """An outline and its holes, in pixels of the slide."""
    largest: float
    """The largest value in it."""
    share: float
    """Share of all that speaks for the class on the slide."""
    at: tuple[float, float]
    """x and y of the centre of the position with the largest value."""


def outlines(values: NDArray[np.float64], stride: int, size: tuple[int, int], threshold: float) -> list[Outline]:
    """The regions above a threshold, the one with the largest share first.

    Args:
        values: The map; what is negative counts as nothing.
        stride: Pixels of the slide for one position.
        size: Height and width of the slide, which no outline leaves.
        threshold: As a share of the largest value.
    """
    positive = np.clip(values, 0, None)
    if not positive.any():
        return []
    padded = np.pad(positive, 1)  # so that a region at the border is closed
    centres = [(np.arange(-1, side + 1) + 0.5) * stride for side in positive.shape]
    contours = contour_generator(centres[1], centres[0], padded, fill_type=FillType.OuterOffset)
    parts: Any = contours.filled(threshold * positive.max(), np.inf)  # its type depends on fill_type
    found = [
        _outline(np.split(corners, starts[1:-1]), positive, stride, size)
        for corners, starts in zip(*parts, strict=True)
        if corners is not None and starts is not None
    ]
    return sorted(found, key=lambda region: -region.share)[:MOST]


def _outline(rings: Rings, positive: NDArray[np.float64], stride: int, size: tuple[int, int]) -> Outline:
    """One region, of whose map only the positions near it are looked at: there may be many, on a large map."""
    left, top = np.floor(rings[0].min(axis=0) / stride).astype(int).clip(min=0)
    right, bottom = np.ceil(rings[0].max(axis=0) / stride).astype(int)
    part = positive[top:bottom, left:right]
    moved = [ring - np.array([left, top]) * stride for ring in rings]
    inside = np.where(mask_of([moved], (part.shape[0], part.shape[1]), stride), part, 0)
    row, column = np.unravel_index(inside.argmax(), inside.shape)
    at = (float(left + column + 0.5) * stride, float(top + row + 0.5) * stride)
    clipped = [np.clip(ring, 0, size[::-1]) for ring in rings]
    return Outline(clipped, float(inside.max()), float(inside.sum() / positive.sum()), at)
