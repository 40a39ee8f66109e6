"""The regions with the largest values, cropped from the slide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from lightning_plugin import Box, TileSource


@dataclass(frozen=True)
class Peak:
    """A place where a map is large."""

    value: float
    lo: tuple[int, ...]
    """First row and column of the square around it, in pixels of the image and inside it."""
    hi: tuple[int, ...]
    """Row and column behind its last."""


def peaks(values: NDArray[np.float64], stride: int, size: tuple[int, int], side: int, count: int) -> list[Peak]:
    """The positions with the largest positive values, no two of which are within a side of each other."""
    left = values.copy()
    found: list[Peak] = []
    near = -(-side // stride)
    while len(found) < count:
        row, column = (int(i) for i in np.unravel_index(left.argmax(), left.shape))
        if left[row, column] <= 0:
            break
        found.append(Peak(float(values[row, column]), *_around((row, column), stride, size, side)))
        left[max(0, row - near + 1) : row + near, max(0, column - near + 1) : column + near] = -np.inf
    return found


def _around(
    position: tuple[int, ...], stride: int, size: tuple[int, int], side: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The corners of the square around a position, moved into the slide where it would leave it."""
    centres = [round((at + 0.5) * stride) for at in position]
    lo = tuple(max(0, min(centre - side // 2, whole - side)) for centre, whole in zip(centres, size, strict=True))
    return lo, tuple(min(start + side, whole) for start, whole in zip(lo, size, strict=True))


def crop(source: TileSource, box: Box) -> Image.Image:
    """The pixels of a box as a picture."""
    return Image.fromarray(source.read(box)[0].permute(1, 2, 0).numpy())
