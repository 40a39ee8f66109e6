"""Blur: tissue whose finest detail is missing beside what is coarser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.ndimage import gaussian_filter

from wsi_trainer.slides.readers.protocol import Pixels
from wsi_trainer.slides.rules.look import Look, Values, check
from wsi_trainer.slides.rules.pieces import joined, large
from wsi_trainer.slides.tissue import Mask, near

_FINE, _COARSE = 1.0, 6.0
"""Standard deviations in pixels of the finer copy: detail is what the first removes, structure what lies between."""
_BLOCK = 128
"""Side of what is looked at at a time, in pixels of the mask."""
_MARGIN = 16
"""Pixels of the mask beyond a block that the filters see."""
_NEAR = 16.0
"""Micrometres over which detail is compared with structure."""
_FLAT = 1.0
"""Grey levels of structure below which a place is too even to tell whether it is sharp."""


@dataclass(frozen=True)
class Blur:
    """Parameters of the rule `blur`: detail in proportion to structure, so that pale tissue is not taken for blurred.

    It sees what is out of focus by about a pixel of its copy of the slide or more.
    """

    name: ClassVar[str] = "blur"

    mpp: float = 2.0
    """Micrometres along a pixel in which detail is looked for; finer takes longer and sees weaker blur."""
    sharpness: float = 0.42
    """Detail over structure below which tissue counts as blurred; sharp tissue has 0.5 and more."""
    window: float = 40.0
    """Micrometres over which the proportion is averaged."""
    smallest: float = 0.03
    """Square millimetres of the smallest blurred place."""

    def __post_init__(self) -> None:
        check(self, mpp=(0.25, 16), sharpness=(0.01, 1), window=(8, 2000), smallest=(0, 100))

    def find(self, look: Look) -> Mask:
        """Where tissue is blurred."""
        detail, structure = _energies(look)
        close = look.pixels_of(_NEAR)
        area = gaussian_filter(look.mask.astype(np.float32), close) + 1e-6
        detail, structure = (gaussian_filter(energy, close) / area for energy in (detail, structure))
        told = look.mask & (structure > _FLAT**2)
        ratio = np.zeros_like(detail)
        ratio[told] = np.log(np.maximum(detail[told], 1e-6) / structure[told]) / 2
        # Of logarithms, or a sharp place would outweigh all that is blurred beside it.
        spread = look.pixels_of(self.window)
        mean = gaussian_filter(ratio, spread) / (gaussian_filter(told.astype(np.float32), spread) + 1e-6)
        blurred = (mean < np.log(self.sharpness)) & told
        found = large(joined(blurred, spread) & look.mask, look.least(self.smallest))
        # Near its border the mean is that of both sides, and seems sharp.
        return near(found, round(spread / 2)) & look.mask


def _energies(look: Look) -> tuple[Values, Values]:
    """Squares of detail and of structure, averaged over each pixel of the mask, and 0 off tissue."""
    detail, structure = (np.zeros(look.mask.shape, np.float32) for _ in range(2))
    height, width = look.mask.shape
    for top in range(0, height, _BLOCK):
        for left in range(0, width, _BLOCK):
            bottom, right = min(top + _BLOCK, height), min(left + _BLOCK, width)
            if not look.mask[top:bottom, left:right].any():
                continue  # nothing of glass is read
            first, last = max(0, top - _MARGIN), min(height, bottom + _MARGIN)
            begin, end = max(0, left - _MARGIN), min(width, right + _MARGIN)
            fine, coarse = _squares(look.finer(first, begin, last - first, end - begin))
            inner = np.s_[top - first : bottom - first, left - begin : right - begin]
            detail[top:bottom, left:right] = _averaged(fine, look.times)[inner]
            structure[top:bottom, left:right] = _averaged(coarse, look.times)[inner]
    return detail * look.mask, structure * look.mask


def _squares(pixels: Pixels) -> tuple[Values, Values]:
    grey = pixels.mean(axis=2, dtype=np.float32)
    smooth = gaussian_filter(grey, _FINE)
    return (grey - smooth) ** 2, (smooth - gaussian_filter(grey, _COARSE)) ** 2


def _averaged(values: Values, times: int) -> Values:
    height, width = values.shape[0] // times, values.shape[1] // times
    return values.reshape(height, times, width, times).mean((1, 3))
