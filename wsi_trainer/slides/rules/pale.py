"""Pale tissue: weaker than the threshold of the mask, and yet another colour than glass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.ndimage import gaussian_filter

from wsi_trainer.slides.rules.look import Look, check
from wsi_trainer.slides.rules.pieces import joined, large
from wsi_trainer.slides.tissue import Mask, near

_NOISES = 4.0
"""Deviations of glass's own noise."""
_MOST = 1 << 20
"""Pixels of glass that are looked at: more tell nothing more."""


@dataclass(frozen=True)
class Pale:
    """Parameters of the rule `pale`: fat, mucus and weakly stained tissue, which Otsu's threshold leaves out."""

    name: ClassVar[str] = "pale"

    stain: float = 4.0
    """Grey levels between the strongest and the weakest channel, more than glass has."""
    smooth: float = 12.0
    """Micrometres over which the colour is averaged before it is compared."""
    smallest: float = 0.03
    """Square millimetres of the smallest piece; what is smaller is dust."""

    def __post_init__(self) -> None:
        check(self, stain=(1, 100), smooth=(0, 500), smallest=(0, 100))

    def find(self, look: Look) -> Mask:
        """Where there is tissue that is not in the mask."""
        pixels = look.pixels
        high = np.maximum(np.maximum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])
        low = np.minimum(np.minimum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])
        stain = gaussian_filter((high - low).astype(np.float32), look.pixels_of(self.smooth))
        glass = stain[~near(look.mask, 8)]
        if not glass.size:
            return np.zeros_like(look.mask)
        glass = glass[:: -(-glass.size // _MOST)]
        # The darker half of what is left: glass is most of it, and pale tissue the tail above.
        usual = float(np.quantile(glass, 0.25))
        noise = 1.4826 * float(np.median(np.abs(glass[glass <= np.median(glass)] - usual)))
        found = stain > usual + max(self.stain, _NOISES * noise)
        found = joined(found, look.pixels_of(40))
        # A rim around what is in the mask is its blurred border, not tissue of its own.
        pieces = large(found & ~near(look.mask, 3), look.least(self.smallest) / 4)
        return large(near(pieces, 3) & found & ~look.mask, look.least(self.smallest))
