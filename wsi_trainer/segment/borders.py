"""Borders of the found classes against the drawn ones, counted block by block.

A pixel is on the border of its class where one of its four neighbours is of another. Pixels that are ignored in what
was drawn are of no class on either side, and make no border; nor does the end of the slide. Whether a border comes
within the tolerance is asked of a block with as many pixels about it as the tolerance reaches, so the numbers are
those of the whole slide.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from lightning_plugin import Box, TileSource
from wsi_trainer.metrics import BorderPredictions
from wsi_trainer.regions import IGNORED
from wsi_trainer.segment.blocks import blocks_of

SIDE = 1024
"""Pixels of a block."""
_EQUAL = 1e-9
"""Of the tolerance and of a pixel: what is as far as the tolerance says is near."""

Mask = NDArray[np.bool_]


def border_pixels(
    found: Any, drawn: TileSource, classes: int, pixel: tuple[float, float], tolerance: float, side: int = SIDE
) -> NDArray[np.float64]:
    """(4, classes): what `BorderPredictions` counts of a slide.

    Args:
        found: An array (height, width) of the places of the pixels' classes, of which boxes are read.
        drawn: The same as it was drawn, or `IGNORED`.
        classes: How many there are.
        pixel: Height and width of a pixel in micrometres.
        tolerance: Micrometres from the centre of one pixel to that of another.
        side: Pixels of a block.
    """
    height, width = drawn.shape[2:]
    halo = [ceil(tolerance / step) + 1 for step in pixel]
    total = np.zeros((len(BorderPredictions.KINDS), classes))
    for box in blocks_of(height, width, side):
        grown = Box(
            (max(box.lo[0] - halo[0], 0), max(box.lo[1] - halo[1], 0)),
            (min(box.hi[0] + halo[0], height), min(box.hi[1] + halo[1], width)),
        )
        inner = tuple(slice(lo - start, hi - start) for lo, hi, start in zip(box.lo, box.hi, grown.lo))
        (top, left), (bottom, right) = grown.lo, grown.hi
        said = np.asarray(found[top:bottom, left:right])
        everywhere = drawn.constant(grown)
        if everywhere is not None and (int(everywhere) == IGNORED or (said == int(everywhere)).all()):
            continue  # most of a slide: there is no border
        truth = drawn.read(grown)[0, 0].numpy()
        said = np.where(truth == IGNORED, truth, said)
        present = sum(np.bincount(values.ravel(), minlength=classes)[:classes] > 0 for values in (truth, said))
        for place in np.flatnonzero(present).tolist():
            borders = [border(values, place) for values in (said, truth)]
            total[:, place] += _near(borders, inner, pixel, tolerance)
    return total


def border(values: NDArray[np.uint8], place: int) -> Mask:
    """The pixels of a class that have a neighbour of another one."""
    mask = values == place
    other = ~mask & (values != IGNORED)
    beside = np.zeros_like(mask)
    for here, there in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        beside[here] |= other[there]
        beside[:, here] |= other[:, there]
    return mask & beside


def _near(borders: Sequence[Mask], inner: tuple[slice, ...], pixel: tuple[float, float], tolerance: float) -> list[int]:
    """Of each border in the inner part: its pixels near the other one, and all."""
    counts = []
    most = tolerance + _EQUAL * (tolerance + min(pixel))
    starts = [part.start for part in inner]
    for own, other in (borders, borders[::-1]):
        mine, theirs = np.argwhere(own[inner]) + starts, np.argwhere(other)
        away = KDTree(theirs * pixel).query(mine * pixel, distance_upper_bound=most)[0] if len(theirs) else np.inf
        counts += [int(np.isfinite(np.broadcast_to(away, len(mine))).sum()), len(mine)]
    return counts
