"""Periodic noise fields, made once for a seed and read at any position.

A field is a small array that repeats in both directions. Its periods are prime, so no tile of a usual
size ever meets the same piece twice in a row, and reading it at a position needs no state: the value
depends on the seed and the position alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float32]


def _band_passed(rng: np.random.Generator, shape: tuple[int, int], low: float, high: float, stretch: float) -> Field:
    """White noise kept between two frequencies (cycles per pixel), with mean 0 and standard deviation 1."""
    fy = np.fft.fftfreq(shape[0])[:, None]
    fx = np.fft.rfftfreq(shape[1])[None, :]
    radius = np.hypot(fy * stretch, fx)
    # Smooth shoulders: a sharp cut in frequency would ring in space.
    keep = np.exp(-((radius / high) ** 4)) * (1.0 - np.exp(-((radius / max(low, 1e-9)) ** 4)))
    spectrum = np.fft.rfft2(rng.random(shape) - 0.5)
    field = np.fft.irfft2(spectrum * keep, s=shape)
    field -= field.mean()
    return (field / field.std()).astype(np.float32)


class Textures:
    """The noise fields that all slides of one seed share; each slide reads them at its own offset."""

    def __init__(self, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, 0x7E47]))
        self.fibre = _band_passed(rng, (761, 769), 1 / 300, 1 / 14, stretch=3.0)
        self.slow = _band_passed(rng, (1217, 1223), 1 / 2000, 1 / 250, stretch=1.0)
        self.edge = _band_passed(rng, (509, 521), 1 / 400, 1 / 40, stretch=1.0)
        # Chromatin lives between periods of 2.2 and 4 px: averaging over 8 px leaves nothing of it.
        self.chromatin = np.clip(_band_passed(rng, (257, 263), 1 / 4.0, 1 / 2.4, stretch=1.0), -2.0, 2.0)
        self.scanner = np.clip(rng.standard_normal((503, 499, 3)), -4, 4).astype(np.float32)


@lru_cache(maxsize=4)
def textures(seed: int) -> Textures:
    """The fields of a seed; making them takes a tenth of a second, so they are kept."""
    return Textures(seed)


def window(field: Field, y: int, x: int, height: int, width: int) -> Field:
    """The piece of a periodic field whose upper left corner is at (y, x)."""
    rows = np.take(field, np.arange(y, y + height), axis=0, mode="wrap")
    return np.take(rows, np.arange(x, x + width), axis=1, mode="wrap")


def sample(field: Field, y: NDArray[np.int64], x: NDArray[np.int64]) -> Field:
    """The values of a periodic field at integer positions."""
    return field[y % field.shape[0], x % field.shape[1]]
