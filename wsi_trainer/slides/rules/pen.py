"""Pen marks: colours that stained tissue does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.ndimage import binary_propagation

from wsi_trainer.slides.rules.look import Look, check, density
from wsi_trainer.slides.rules.pieces import joined, large
from wsi_trainer.slides.tissue import Mask, near

_BLUE = 1.15
"""Tissue takes more green light than red: haematoxylin as much of both, eosin nearly no red. Blue, green and black
felt pens take more red than green."""
_RED = 0.75
"""Red pens take all blue and green light and no red. Eosin lets blue pass, and DAB and melanin take red, too."""
_NO_RED = 0.25
_LESS_BLUE, _LESS_RED, _DARK = 0.8, 0.6, 0.5
"""The same over tissue: only where it touches a mark that is beyond doubt."""
_BLACK = 0.8
"""Black takes all colours alike, to within a fifth, and takes four fifths of the light or more."""
_NO_LIGHT = 0.7
_LESS_BLACK, _DARKER = 0.6, 0.9


@dataclass(frozen=True)
class Pen:
    """Parameters of the rule `pen`: black by its darkness, blue, green and red by what they do to red light."""

    name: ClassVar[str] = "pen"

    density: float = 0.25
    """The optical density, in the colour it takes most of, from which on a mark counts as one."""
    smallest: float = 0.03
    """Square millimetres of the smallest mark: single cells with brown or black pigment are smaller."""
    grow: float = 24.0
    """Micrometres around a mark that go with it: its border is pale."""

    def __post_init__(self) -> None:
        check(self, density=(0.05, 2), smallest=(0, 100), grow=(0, 1000))

    def find(self, look: Look) -> Mask:
        """Where there are pen marks on tissue or what passes for it."""
        red, green, blue = density(look.pixels[look.mask]).T
        most = np.maximum(np.maximum(red, green), blue)
        seen = most >= self.density
        is_blue = red >= _BLUE * green
        is_red = (blue >= _RED * green) & (red <= _NO_RED * blue)
        is_black = (np.minimum(np.minimum(red, green), blue) >= _BLACK * most) & (most >= _NO_LIGHT)
        sure = is_blue | is_red | is_black
        # Over tissue its colour is added: less clear, and next to what is clear.
        darkest = np.minimum(np.minimum(red, green), blue)
        likely = (blue >= _LESS_RED * green) & (red <= 2 * _NO_RED * blue) & (most >= _DARK)
        likely |= ((red >= _LESS_BLUE * green) & (most >= _DARK)) | (
            (darkest >= _LESS_BLACK * most) & (most >= _DARKER)
        )
        marks, around = np.zeros_like(look.mask), np.zeros_like(look.mask)
        marks[look.mask] = seen & sure
        around[look.mask] = seen & (sure | likely)
        marks = large(joined(marks, look.pixels_of(30)), look.least(self.smallest / 4))
        marks = binary_propagation(marks, mask=joined(around, look.pixels_of(20)) | marks)
        whole = large(marks, look.least(self.smallest))
        return near(whole, round(look.pixels_of(self.grow))) & look.mask
