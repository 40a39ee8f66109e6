"""Folds: slender pieces of tissue that are much darker than what lies around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.ndimage import gaussian_filter

from wsi_trainer.slides.rules.look import Look, check, density
from wsi_trainer.slides.rules.pieces import joined, slender
from wsi_trainer.slides.tissue import Mask, near

_ALIKE = 1.4
"""How much more of red a fold may take than of green and blue: dense nuclei take more of red, one more layer of all."""
_LEAST = 0.02
"""Optical density of what counts as tissue around a fold."""


@dataclass(frozen=True)
class Fold:
    """Parameters of the rule `fold`: two layers of tissue take twice the light of one, along a line."""

    name: ClassVar[str] = "fold"

    darker: float = 1.4
    """The optical density of a fold over that of the tissue around it."""
    around: float = 200.0
    """Micrometres over which the tissue around it is averaged."""
    widest: float = 150.0
    """Micrometres of the widest fold; what is wider is dense tissue."""
    slimness: float = 3.0
    """Least length of a fold over its width."""
    smallest: float = 0.01
    """Square millimetres of the smallest fold."""

    def __post_init__(self) -> None:
        check(self, darker=(1, 10), around=(20, 5000), widest=(10, 5000), slimness=(1, 100), smallest=(0, 100))

    def find(self, look: Look) -> Mask:
        """Where tissue is folded."""
        spread = look.pixels_of(self.around)
        area = gaussian_filter(look.mask.astype(np.float32), spread) + 1e-6
        times = []
        for channel in range(3):
            # A few pixels' mean: folds are even, and a row of nuclei is not one.
            dark = gaussian_filter(density(look.pixels[..., channel]) * look.mask, look.pixels_of(10))
            times.append(dark / (gaussian_filter(dark, spread) / area + _LEAST))
        red, least = times[0], np.minimum(times[1], times[2])
        folded = (least > self.darker) & (red < _ALIKE * least) & look.mask
        found = slender(
            joined(folded, look.pixels_of(30)),
            look.pixels_of(self.widest),
            look.least(self.smallest),
            self.slimness,
        )
        return near(found, 1) & look.mask
