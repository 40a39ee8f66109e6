"""A layer over a slide: a value for each square of it, as tiles of numbers that the browser colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.view.refusals import NotThere

SIDE = 256
"""Positions a side of a tile of numbers."""

Kind = Literal["map", "tissue"]


@dataclass(frozen=True, eq=False)
class Layer:
    """A grid of numbers over a slide."""

    kind: Kind
    values: NDArray[Any]
    """(rows, columns)."""
    stride: float
    """Pixels of the slide's level 0 along one position."""

    @property
    def levels(self) -> int:
        """How many levels there are until one fits into a tile; each has half the positions along each side."""
        levels = 1
        while max(self.values.shape) > SIDE * 2 ** (levels - 1):
            levels += 1
        return levels

    def level(self, level: int) -> NDArray[np.float32]:
        """The whole grid at a level."""
        return means(np.asarray(self.values), 2**level)

    def tile(self, level: int, row: int, column: int) -> NDArray[np.float32]:
        """The numbers of a tile; those of the last row and column have what is left."""
        if not 0 <= level < self.levels:
            raise NotThere(f"the layer has no level {level}; it has 0 to {self.levels - 1}")
        reach = SIDE * 2**level
        rows, columns = self.values.shape
        if not (0 <= row * reach < rows and 0 <= column * reach < columns):
            raise NotThere(f"the layer has no tile {row}, {column} at level {level}")
        part = self.values[row * reach : (row + 1) * reach, column * reach : (column + 1) * reach]
        return means(np.asarray(part), 2**level)

    def position(self, x: float, y: float) -> tuple[int, int]:
        """The row and the column of the position at a place of the slide."""
        row, column = int(y // self.stride), int(x // self.stride)
        if not (0 <= row < self.values.shape[0] and 0 <= column < self.values.shape[1]):
            raise NotThere(f"the layer has no position at {x:g}, {y:g}")
        return row, column

    def ranks(self) -> NDArray[np.float32]:
        """The rank of each position among all: one more than there are larger values. What is no number has none."""
        values = np.asarray(self.values, np.float64)
        ordered = np.sort(values[np.isfinite(values)])
        ranks = len(ordered) - np.searchsorted(ordered, values, side="right") + 1
        return np.where(np.isfinite(values), ranks, np.nan).astype(np.float32)

    def about(self) -> dict[str, Any]:
        """What the page needs to draw the layer."""
        numbers = np.asarray(self.values)
        finite = numbers[np.isfinite(numbers)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        rows, columns = numbers.shape
        return {
            "kind": self.kind,
            "rows": rows,
            "columns": columns,
            "stride": self.stride,
            "levels": self.levels,
            "low": low,
            "high": high,
        }


def means(values: NDArray[Any], side: int) -> NDArray[np.float32]:
    """Means over squares of `side` × `side`; those at the border are over what is there."""
    if side == 1:
        return np.ascontiguousarray(values, dtype=np.float32)
    rows, columns = (np.arange(0, size, side) for size in values.shape)
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0, dtype=np.float64), columns, axis=1)
    heights, widths = (
        np.diff(np.append(starts, size)) for starts, size in zip((rows, columns), values.shape, strict=True)
    )
    return (sums / (heights[:, None] * widths)).astype(np.float32)
