"""Outline of tissue: a smooth field, positive inside.

The field is interpolated from a coarse lattice over the whole slide. So its bound over a box is the bound
of a few lattice nodes, and a box of glass is known as such without looking at its pixels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .spec import STREAM_OUTLINE, SlideSpec
from .texture import Field, Textures, sample, window

STEP = 64
EDGE = 0.035  # how far the fine edge noise (clipped at two deviations) moves the outline
SOFT = 10.0  # how steeply tissue sets in


def _smooth_noise(rng: np.random.Generator, rows: int, cols: int, bumps: int) -> NDArray[np.float64]:
    """Noise with about ``bumps`` bumps along the longer side, between -1 and 1."""
    cell = max(rows, cols) / bumps
    grid = rng.random((int(rows / cell) + 3, int(cols / cell) + 3)) * 2 - 1
    y, x = np.arange(rows) / cell, np.arange(cols) / cell
    return _weights(y, grid.shape[0], smooth=True) @ grid @ _weights(x, grid.shape[1], smooth=True).T


def _weights(at: NDArray[np.float64], nodes: int, smooth: bool = False) -> NDArray[np.float64]:
    """Rows of interpolation weights of ``nodes`` lattice nodes at the positions ``at``."""
    low = np.clip(np.floor(at).astype(int), 0, nodes - 2)
    t = np.clip(at - low, 0.0, 1.0)
    if smooth:
        t = t * t * (3 - 2 * t)
    weights = np.zeros((len(at), nodes))
    rows = np.arange(len(at))
    weights[rows, low] = 1 - t
    weights[rows, low + 1] = t
    return weights


class Outline:
    """The tissue of one slide."""

    def __init__(self, spec: SlideSpec, textures: Textures, offset: tuple[int, int]) -> None:
        self._edge = textures.edge
        self._offset = offset
        self.lattice = self._make_lattice(spec)

    @staticmethod
    def _make_lattice(spec: SlideSpec) -> NDArray[np.float32]:
        rng = spec.rng(STREAM_OUTLINE)
        rows, cols = spec.height // STEP + 2, spec.width // STEP + 2
        y = (np.arange(rows) * STEP / spec.height)[:, None]
        x = (np.arange(cols) * STEP / spec.width)[None, :]
        field = np.full((rows, cols), -np.inf)
        for _ in range(int(rng.integers(1, 4))):
            cy, cx = rng.uniform(0.3, 0.7, 2)
            ry, rx = rng.uniform(0.22, 0.42, 2)
            angle = rng.uniform(0, np.pi)
            u = (y - cy) * np.cos(angle) + (x - cx) * np.sin(angle)
            v = (x - cx) * np.cos(angle) - (y - cy) * np.sin(angle)
            field = np.maximum(field, 1 - np.hypot(u / ry, v / rx))
        field += 0.30 * _smooth_noise(rng, rows, cols, 5) + 0.20 * _smooth_noise(rng, rows, cols, 13)
        # A rim of glass on all sides, as a scanner leaves it.
        rim = np.minimum(np.minimum(y, 1 - y), np.minimum(x, 1 - x))
        field -= (1 - np.clip(rim / 0.2, 0, 1)) ** 2
        # The level that leaves the wanted share of tissue.
        level = np.quantile(field, 1 - spec.tissue)
        return np.minimum(field - level, (rim - 0.03) * 12).astype(np.float32)

    def _nodes(self, y: int, x: int, height: int, width: int) -> NDArray[np.float32]:
        return self.lattice[y // STEP : (y + height - 1) // STEP + 2, x // STEP : (x + width - 1) // STEP + 2]

    def is_glass(self, y: int, x: int, height: int, width: int) -> bool:
        """True if no tissue touches the box. Never wrong; may be False for a box that only nearly is."""
        return bool(self._nodes(y, x, height, width).max() + 2 * EDGE <= 0)

    def amount(self, y: int, x: int, height: int, width: int) -> Field:
        """Cover of each pixel of a box by tissue, 0 to 1."""
        nodes = self._nodes(y, x, height, width)
        at_y = (np.arange(height) + y % STEP) / STEP
        at_x = (np.arange(width) + x % STEP) / STEP
        field = _weights(at_y, nodes.shape[0]).astype(np.float32) @ nodes
        field = field @ _weights(at_x, nodes.shape[1]).astype(np.float32).T
        edge = window(self._edge, y + self._offset[0], x + self._offset[1], height, width)
        field += EDGE * np.clip(edge, -2, 2)
        return np.clip(field * SOFT, 0.0, 1.0)

    def amount_at(self, y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same at single positions, which may lie anywhere."""
        rows, cols = self.lattice.shape
        fy = np.clip(y / STEP, 0, rows - 1.001)
        fx = np.clip(x / STEP, 0, cols - 1.001)
        iy, ix = fy.astype(int), fx.astype(int)
        ty, tx = fy - iy, fx - ix
        upper = self.lattice[iy, ix] * (1 - tx) + self.lattice[iy, ix + 1] * tx
        lower = self.lattice[iy + 1, ix] * (1 - tx) + self.lattice[iy + 1, ix + 1] * tx
        iy, ix = (
            np.floor(y).astype(np.int64) + self._offset[0],
            np.floor(x).astype(np.int64) + self._offset[1],
        )
        edge = EDGE * np.clip(sample(self._edge, iy, ix), -2, 2)
        return np.clip((upper * (1 - ty) + lower * ty + edge) * SOFT, 0.0, 1.0)
