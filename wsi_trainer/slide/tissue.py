"""Tissue masks: Otsu's threshold on colour, tidied, on a coarse copy of the slide, and their label images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label, maximum_filter, median_filter

from wsi_trainer.errors import SlideError
from wsi_trainer.slide.formats.base import Pixels
from wsi_trainer.slide.geometry import Resolution

Mask = NDArray[np.bool_]

MASK_MPP = 8.0
"""About how large a pixel of the mask is, in micrometres."""

LABEL = "tissue"
"""The name of the mask among the labels of a store."""

MOST_COARSE = 2048
"""Longest side of the coarse copy of a slide that does not say how large its pixels are."""

_LEAST_SATURATION = 14
"""Grey levels between the strongest and the weakest channel below which nothing counts as stained:
on a slide of background alone Otsu would cut the scanner's noise in two."""

_DARK = 64  # grey level
_GROW = 3  # px of the mask around tissue, so that its border is not cut
_SMALLEST = 24  # px of the mask; smaller pieces are dust

REMOVED = "Removed"
"""Classes that begin so are of what a rule took out of the mask: they are in the file to be looked at."""


@dataclass(frozen=True)
class TissueMask:
    """A mask and how coarse it is.

    Attributes:
        mask: True where tissue is.
        scale: pixels of the image along one pixel of the mask.
        threshold: the saturation that Otsu's method chose; None for a mask that was drawn.
        lost: the share of the pixels above the threshold that lie outside the tidied mask.
        found: what each rule that was asked for has taken out of the mask or put into it; the first come first.
    """

    mask: Mask
    scale: int
    threshold: float | None = None
    lost: float = 0.0
    found: Mapping[str, Mask] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Fraction of the slide that is tissue."""
        return float(self.mask.mean())

    def shares(self) -> dict[str, float]:
        """Area each rule removed or added, as a fraction of the mask before it."""
        found, shown = {}, self.mask
        for name, here in reversed(list(self.found.items())):
            # Backwards: what a rule took lies outside of what was left, and what it put in lies within.
            added = bool((here & shown).any())
            shown = shown & ~here if added else shown | here
            found[name] = float(here.sum() / max(1, shown.sum()))
        return dict(reversed(list(found.items())))

    def any_in(self, y: int, x: int, height: int, width: int) -> bool:
        """True if a box of the image touches tissue."""
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


def mask_scale(resolution: Resolution | None, shape: tuple[int, int]) -> int:
    """Pixels of an image along one of its mask: the power of two that comes next to MASK_MPP.

    Of an image that does not say how large its pixels are, the one that keeps within `MOST_COARSE`.
    """
    scale = 1
    if resolution is None:
        while max(shape) > MOST_COARSE * scale:
            scale *= 2
        return scale
    while resolution.mean * scale * 1.42 < MASK_MPP:
        scale *= 2
    return scale


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
    closed = ~near(~near(raw, 2), 2)  # without small holes
    mask = near(without_dust(closed), _GROW)
    lost = float((raw & ~mask).sum() / max(1, raw.sum()))
    return TissueMask(mask, scale, float(threshold), lost)


def is_dark(overview: Pixels) -> bool:
    """True for a slide with a black ground, as in fluorescence: its median is below a quarter of white."""
    below = 2 * np.count_nonzero(overview < _DARK) - overview.size
    if below:  # counting is ten times as fast as a median
        return bool(below > 0)
    return bool(np.median(overview) < _DARK)


def _signal(overview: Pixels) -> NDArray[np.uint8]:
    red, green, blue = (overview[..., channel] for channel in range(3))
    signal = np.maximum(np.maximum(red, green), blue)
    if not is_dark(overview):
        signal = signal - np.minimum(np.minimum(red, green), blue)
    return np.asarray(median_filter(signal, 3, mode="nearest"))


def any_of(mask: Mask, times: int) -> Mask:
    """A coarser mask: a pixel is one of the mask if any of the `times` × `times` that it covers is."""
    rows, columns = (np.arange(0, side, times) for side in mask.shape)
    return np.asarray(np.logical_or.reduceat(np.logical_or.reduceat(mask, rows, axis=0), columns, axis=1))


def near(mask: Mask, reach: int) -> Mask:
    """The pixels with one of the mask in the square of `reach` pixels to each side."""
    return np.asarray(maximum_filter(mask, 2 * reach + 1, mode="constant"))


def large(mask: Mask, least: float, corners: bool = True) -> Mask:
    """The pieces of at least so many pixels; those that touch at a corner are one, if that is wanted."""
    labels, _ = label(mask, np.ones((3, 3)) if corners else None)
    keep = np.bincount(labels.reshape(-1)) >= least
    keep[0] = False
    return np.asarray(keep[labels])


def without_dust(mask: Mask) -> Mask:
    """The mask without its pieces of a few pixels."""
    return large(mask, _SMALLEST, corners=False)


def draw_tissue(
    path: Path, shape: tuple[int, int], scale: int, source_scale: tuple[float, float], origin: tuple[int, int] = (0, 0)
) -> TissueMask:
    """A mask from GeoJSON polygons, which hold full-resolution pixels of the slide: all whose centre lies in one.

    Args:
        path: The GeoJSON file.
        shape: Height and width of the mask.
        scale: Pixels of the image along one of the mask.
        source_scale: Pixels of level 0 of the slide along one of the mask, y and x.
        origin: Begin of the mask in level 0 of the slide, y and x.
    """
    from wsi_trainer.regions.outlines import read_geojson
    from wsi_trainer.regions.shapes import mask_of

    regions = [region for region in read_geojson(path) if region.rings]
    if not regions:
        raise SlideError(path, "holds no polygon")
    kept = [region.rings for region in regions if not region.name.startswith(REMOVED)]
    mask = mask_of(([(ring - origin[::-1]) / source_scale[::-1] for ring in rings] for rings in kept), shape, 1)
    return TissueMask(mask, scale)
