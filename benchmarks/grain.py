"""Pictures of a texture with a grain in it: what the study `frozen_or_trained` calls slides.

A patch has one of four coarse textures (periods of 4.5 to 16 pixels), in a colour and of a strength that are drawn for
it, and over that one of two fine grains (periods of 3 to 3.6, or of 2.2 to 2.6), which are equally strong. All of it is
band-passed noise.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32
"""Pixels along a side of a patch."""
PATCHES = 6
"""Patches along a side of a slide."""
COARSE = ((16, 10), (10, 7), (7, 5.5), (5.5, 4.5))
FINE = ((3.6, 3.0), (2.6, 2.2))
"""Longest and shortest period of each texture, in pixels."""
Label = Literal["grain", "texture"]
"""What a fifth of a positive slide's patches differ in: the grain, or the coarse texture."""
Numbers = NDArray[np.int64]
Noise = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What the label of a slide is."""

    label: Label
    share: float = 0.2
    """Of a positive slide's patches."""

    def draw(self, rng: np.random.Generator, positive: bool) -> tuple[Numbers, Numbers]:
        """The coarse texture and the grain of each patch of a slide."""
        count = PATCHES**2
        marked = np.zeros(count, bool)
        marked[rng.permutation(count)[: round(self.share * count)]] = positive
        if self.label == "grain":
            return rng.integers(0, len(COARSE), count), marked.astype(np.int64)
        return np.where(marked, len(COARSE) - 1, rng.integers(0, len(COARSE) - 1, count)), rng.integers(0, 2, count)


def patches(rng: np.random.Generator, coarse: Numbers, fine: Numbers) -> NDArray[np.uint8]:
    """Pixels of patches, (patches, 3, side, side), with these textures."""
    count = len(coarse)
    colour = rng.normal((190, 140, 180), 18, (count, 3))
    relief = _bands(rng, coarse, COARSE) * rng.uniform(12, 28, (count, 1, 1))
    relief += _bands(rng, fine, FINE) * rng.uniform(17, 31, (count, 1, 1))
    return np.clip(np.rint(colour[:, :, None, None] + relief[:, None]), 0, 255).astype(np.uint8)


def _bands(rng: np.random.Generator, kinds: Numbers, periods: tuple[tuple[float, float], ...]) -> Noise:
    """Noise of mean 0 and deviation 1 in the band of each patch."""
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE))
    low, high = (np.array([1 / pair[place] for pair in periods])[kinds][:, None, None] for place in (0, 1))
    keep = np.exp(-((frequency / high) ** 6)) * (1 - np.exp(-((frequency / low) ** 6)))
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((len(kinds), SIDE, SIDE))) * keep, s=(SIDE, SIDE))
    noise -= noise.mean((1, 2), keepdims=True)
    return noise / noise.std((1, 2), keepdims=True)


def write_slides(folder: Path, kind: Kind, seed: int, splits: dict[str, int]) -> Path:
    """Slides as PNG files, every second of a split positive; returns their manifest."""
    manifest = folder / "manifest.csv"
    if manifest.is_file():
        return manifest
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng((seed, kind.label == "grain"))
    rows = []
    for split, count in splits.items():
        for number in range(count):
            cut = patches(rng, *kind.draw(rng, bool(number % 2)))
            grid = cut.reshape(PATCHES, PATCHES, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2)
            Image.fromarray(grid.reshape(PATCHES * SIDE, PATCHES * SIDE, 3)).save(folder / f"{split}{number}.png")
            rows.append([f"{split}{number}.png", number % 2, split, 0.5])
    with manifest.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["slide", "label", "split", "mpp"], *rows])
    return manifest
