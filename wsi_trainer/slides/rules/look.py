"""What a rule looks at, and what all rules have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.slides.readers.protocol import Pixels
from wsi_trainer.slides.tissue import Mask

Values = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Look:
    """A coarse copy of a slide and what is tissue on it so far."""

    pixels: Pixels
    """(height, width, 3), the pixels of the mask."""
    mpp: float
    """Micrometres along one of them."""
    mask: Mask
    finer: Callable[[int, int, int, int], Pixels]
    """The pixels of a box (top, left, height, width) of the mask, `times` as fine in both directions."""
    times: int = 1

    def pixels_of(self, micrometres: float) -> float:
        """A length in pixels of the mask."""
        return micrometres / self.mpp

    def least(self, square_millimetres: float) -> float:
        """An area in pixels of the mask."""
        return square_millimetres * 1e6 / self.mpp**2


class Rule(Protocol):
    """The parameters of a rule, and the rule."""

    name: ClassVar[str]

    def find(self, look: Look) -> Mask:
        """The pixels of the coarse copy at which there is what the rule looks for."""
        ...


def check(rule: Rule, **limits: tuple[float, float]) -> None:
    """Refuses parameters outside of their limits."""
    for parameter in fields(rule):  # type: ignore[arg-type]
        value, (low, high) = getattr(rule, parameter.name), limits[parameter.name]
        if not low <= value <= high:
            raise UserError(f"--{rule.name}.{parameter.name} {value:g}: expected {low:g} to {high:g}")


def density(pixels: Pixels) -> Values:
    """How much light each channel loses, as -log10 of what is left: stains add up in it."""
    table = -np.log10(np.maximum(np.arange(256, dtype=np.float32), 1) / 255)
    return table[pixels]
