"""Edges of the cover glass, and rims of the bubbles below it: slender, and without the colour of a stain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wsi_trainer.slides.rules.look import Look, check, density
from wsi_trainer.slides.rules.pieces import slender
from wsi_trainer.slides.tissue import Mask, near

_GREY = 0.3
"""How much less than the strongest the weakest channel may take; with stains it is half or more."""
_SEEN, _BLACK = 0.06, 0.7
"""Optical densities: from the first on something is there, and from the second on it is a black pen."""
_SLIM = 6.0
"""Least length over width."""
_MARGIN = 4
"""Pixels by which the mask is wider than what it is about."""


@dataclass(frozen=True)
class Edge:
    """Parameters of the rule `edge`: lines and rings that take all colours alike, and thin long pieces."""

    name: ClassVar[str] = "edge"

    widest: float = 120.0
    """Micrometres of the widest line."""
    shortest: float = 0.5
    """Millimetres of the shortest line."""
    grow: float = 40.0
    """Micrometres around a line that go with it: lenses give it coloured seams."""

    def __post_init__(self) -> None:
        check(self, widest=(8, 2000), shortest=(0.05, 100), grow=(0, 1000))

    def find(self, look: Look) -> Mask:
        """Where such lines pass for tissue."""
        # Looked for on glass too: a line whose half is in the mask is as long as it is.
        taken = density(look.pixels)
        most, least = taken.max(2), taken.min(2)
        lines = (most > _SEEN) & (most < _BLACK) & (most - least < _GREY * most)
        length, widest = look.pixels_of(1000 * self.shortest), look.pixels_of(self.widest)
        found = slender(lines, widest, length, _SLIM) & _longer(lines, length)
        # With a coloured seam the mask takes them for tissue: thin long pieces by themselves, wider by its margin.
        found |= slender(look.mask, widest + 2 * _MARGIN, length, _SLIM) & _longer(look.mask, length)
        return near(found, round(look.pixels_of(self.grow))) & look.mask


def _longer(mask: Mask, length: float) -> Mask:
    """The pieces whose height or width is at least a length: a line has one, a ring both."""
    from scipy import ndimage

    labels, _ = ndimage.label(mask, np.ones((3, 3)))
    found = np.zeros_like(mask)
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        if max(part.stop - part.start for part in place) >= length:
            found[place] |= labels[place] == number
    return found
