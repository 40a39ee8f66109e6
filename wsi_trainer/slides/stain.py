"""Changing the stains of a slide: haematoxylin, eosin and residue, and a tint, pixel by pixel.

Tables of logarithms and exponentials make the result of a pixel the same wherever it lies in a tile: vector
units round an exponential differently at the end of a row, and a tile would show how the slide was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

# Directions of the stains in optical density of R, G and B: haematoxylin, eosin, and what is left,
# measured by Ruifrok and Johnston (2001).
_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])

_STEPS = 1024  # of the table of exponentials for one unit of optical density
_DEEPEST = 16  # optical density beyond which everything is black
_GLASS = 255
_BAND = 1 << 14  # pixels at a time: what they take beside themselves, some forty bytes each, stays in the cache


@lru_cache(maxsize=1)
def _tables() -> tuple[Tensor, Tensor]:
    """Optical density of each grey level; grey level of each step of optical density (float32)."""
    levels = torch.arange(256, dtype=torch.float64).clamp_min(0.5)
    density = -torch.log(levels / _GLASS)
    steps = torch.arange(_DEEPEST * _STEPS, dtype=torch.float64) / _STEPS
    back = torch.round(_GLASS * torch.exp(-steps)).to(torch.uint8)
    return density.float(), back


@dataclass(frozen=True)
class StainShift:
    """Factors on the amounts of haematoxylin, eosin and residue, and what is added to the density of R, G, B.

    The tint fades towards glass, which stays as it is: background remains constant and white.
    """

    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    tint: tuple[float, ...] = (0.0, 0.0, 0.0)

    @cached_property
    def matrix(self) -> np.ndarray:
        """Matrix that densities of R, G, B are multiplied by: into stains, scaled, and back."""
        unit = _STAINS / np.linalg.norm(_STAINS, axis=1, keepdims=True)
        return np.asarray(np.linalg.inv(unit) @ np.diag(self.factors) @ unit).T

    def apply(self, pixels: Tensor) -> Tensor:
        """Bytes (n, 3, y, x) with changed stains."""
        if pixels.dtype != torch.uint8:
            raise TypeError(f"stains are changed on bytes, not on {pixels.dtype}: augment before normalising")
        out = torch.empty_like(pixels)
        rows = max(1, _BAND // max(1, pixels.shape[0] * pixels.shape[3]))
        for band, target in zip(pixels.split(rows, 2), out.split(rows, 2)):
            self._fill(target, band)
        return out

    def _fill(self, out: Tensor, pixels: Tensor) -> None:
        density, back = _tables()
        # Colour by colour, so that each lies in one piece, in whichever order the pixels come.
        red, green, blue = (density[pixels[:, channel].long()] for channel in range(3))
        # How much of anything there is, from 0 on glass to 1: tint only what is stained.
        amount = ((red + green + blue) * (2 / 3)).clamp_max(1)
        matrix = self.matrix
        for channel in range(3):
            mixed = red * float(matrix[channel, 0])
            mixed += green * float(matrix[channel, 1])
            mixed += blue * float(matrix[channel, 2])
            mixed += amount * float(self.tint[channel])
            step = (mixed * _STEPS).round_().clamp_(0, len(back) - 1).int()
            out[:, channel] = back[step]
