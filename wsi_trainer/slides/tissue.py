"""Which part of a slide is tissue: Otsu's threshold on colour, tidied, on a coarse copy of the slide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from .errors import SlideError
from .readers.protocol import Pixels

Mask = NDArray[np.bool_]
Ring = list[tuple[float, float]]
"""Corners as x and y."""

MASK_MPP = 8.0
"""About how large a pixel of the mask is, in micrometres."""

_LEAST_SATURATION = 14
"""Grey levels between the strongest and the weakest channel below which nothing counts as stained:
on a slide of glass alone Otsu would cut the scanner's noise in two."""

_FARTHEST = 1e8  # px; no slide reaches so far, and drawing counts in 32 bits
_GROW = 3  # px of the mask around tissue, so that its border is not cut
_SMALLEST = 24  # px of the mask; smaller pieces are dust


@dataclass(frozen=True)
class TissueMask:
    """A mask and how coarse it is.

    Attributes:
        mask: True where tissue is.
        scale: pixels of the image along one pixel of the mask.
        threshold: the saturation that Otsu's method chose; None for a mask that was drawn.
        lost: the share of the pixels above the threshold that lie outside the tidied mask.
    """

    mask: Mask
    scale: int
    threshold: float | None = None
    lost: float = 0.0

    @property
    def share(self) -> float:
        """How much of the slide is tissue."""
        return float(self.mask.mean())

    def any_in(self, y: int, x: int, height: int, width: int) -> bool:
        """Whether a box of the image touches tissue."""
        return bool(self._cut(y, x, height, width).any())

    def cover(self, y: int, x: int, height: int, width: int) -> Mask:
        """The mask of each pixel of a box inside the image."""
        part = self._cut(y, x, height, width)
        part = part.repeat(self.scale, 0).repeat(self.scale, 1)
        top, left = y % self.scale, x % self.scale
        return part[top : top + height, left : left + width]

    def _cut(self, y: int, x: int, height: int, width: int) -> Mask:
        # The mask may be one pixel short where the image's size is not a multiple of the scale: its last is continued.
        parts, missing = [], []
        for start, length, known in ((y, height, self.mask.shape[0]), (x, width, self.mask.shape[1])):
            first, end = start // self.scale, -(-(start + length) // self.scale)
            inside = slice(min(first, known - 1), min(end, known))
            parts.append(inside)
            missing.append(max(0, end - first - (inside.stop - inside.start)))
        part = self.mask[parts[0], parts[1]]
        if any(missing):
            part = np.pad(part, ((0, missing[0]), (0, missing[1])), mode="edge")
        return part


def otsu(values: NDArray[np.uint8]) -> int:
    """The threshold that splits values into the two classes with the largest variance between them."""
    counts = np.bincount(values.reshape(-1), minlength=256).astype(np.float64)
    weight = np.cumsum(counts)
    mass = np.cumsum(counts * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (mass[-1] * weight - mass * weight[-1]) ** 2 / (weight * (weight[-1] - weight))
    return int(np.argmax(np.nan_to_num(between)))


def find_tissue(overview: Pixels, scale: int) -> TissueMask:
    """The tissue on a coarse copy of a slide.

    On bright slides tissue is what is coloured; on dark ones (fluorescence) it is what is bright.
    """
    signal = _signal(overview)
    threshold = max(otsu(signal), _LEAST_SATURATION)
    raw = signal > threshold
    mask = _tidy(raw)
    lost = float((raw & ~mask).sum() / max(1, raw.sum()))
    return TissueMask(mask, scale, float(threshold), lost)


def _signal(overview: Pixels) -> NDArray[np.uint8]:
    dark = np.median(overview) < 64
    signal = overview.max(2) if dark else overview.max(2) - overview.min(2)
    # A median over 3 x 3 removes noise of single pixels and keeps borders.
    return np.asarray(Image.fromarray(signal).filter(ImageFilter.MedianFilter(3)))


def _tidy(raw: Mask) -> Mask:
    """Without dust, with small holes closed, and a little wider."""
    image = Image.fromarray(raw.astype(np.uint8) * 255)
    closed = image.filter(ImageFilter.MaxFilter(5)).filter(ImageFilter.MinFilter(5))
    kept = _without_dust(np.asarray(closed) > 0)
    grown = Image.fromarray(kept.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(2 * _GROW + 1))
    return np.asarray(grown) > 0


def _without_dust(mask: Mask) -> Mask:
    from scipy import ndimage

    labels, _ = ndimage.label(mask)
    sizes = np.bincount(labels.reshape(-1))
    keep = sizes >= _SMALLEST
    keep[0] = False
    return np.asarray(keep[labels])


def draw_tissue(
    path: Path, shape: tuple[int, int], scale: int, source_scale: tuple[float, float], origin: tuple[int, int] = (0, 0)
) -> TissueMask:
    """A mask from GeoJSON polygons, which hold full-resolution pixels of the slide.

    Args:
        path: The GeoJSON file.
        shape: Height and width of the mask.
        scale: Pixels of the image along one of the mask.
        source_scale: Pixels of level 0 of the slide along one of the mask, y and x.
        origin: Where in level 0 of the slide the mask begins, y and x.
    """
    image = Image.new("1", (shape[1], shape[0]))
    draw = ImageDraw.Draw(image)
    for rings in _polygons(path):
        for number, ring in enumerate(rings):
            points = [
                ((x - origin[1]) / source_scale[1] - 0.5, (y - origin[0]) / source_scale[0] - 0.5) for x, y in ring
            ]
            draw.polygon(points, fill=int(number == 0))  # the first ring is the outline, others are holes
    return TissueMask(np.array(image, bool), scale)


def _polygons(path: Path) -> list[list[Ring]]:
    """The polygons of a GeoJSON file, each an outline and its holes."""
    try:
        content = json.loads(path.read_bytes())
        polygons = list(_coordinates(content))
        rings = [[_ring(ring) for ring in polygon] for polygon in polygons]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise SlideError(path, f"not GeoJSON with polygons: {error}") from error
    if not any(rings):
        raise SlideError(path, "holds no polygon")
    return rings


def _coordinates(value: Any) -> Iterator[Any]:
    """The coordinates of all polygons in a collection, a feature or a geometry."""
    kind = value["type"] if isinstance(value, dict) else None
    if kind == "Polygon":
        yield value["coordinates"]
    elif kind == "MultiPolygon":
        yield from value["coordinates"]
    elif kind == "Feature":
        yield from _coordinates(value["geometry"])
    elif kind in ("FeatureCollection", "GeometryCollection"):
        for part in value["features" if kind == "FeatureCollection" else "geometries"]:
            yield from _coordinates(part)
    elif kind is None:
        raise TypeError(f"expected a feature or a geometry instead of {str(value)[:40]}")


def _ring(points: Any) -> Ring:
    """The corners of a ring, x and y; a third number of a point is a height, which slides do not have."""
    ring = []
    for point in points:
        x, y = point[:2]
        if not all(isinstance(v, int | float) and abs(v) <= _FARTHEST for v in (x, y)):
            raise ValueError(f"a corner at {x}, {y}; expected numbers of pixels")
        ring.append((float(x), float(y)))
    if len(ring) < 3:
        raise ValueError(f"a ring of {len(ring)} points; expected 3 or more")
    return ring
