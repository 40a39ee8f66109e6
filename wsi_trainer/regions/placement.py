"""Where an image lies in its slide: regions are drawn in pixels of the slide's level 0, and cut in the image's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.places.stored import place_of_store
from wsi_trainer.slides.blocks import is_own_store


@dataclass(frozen=True)
class Placement:
    """The corner of an image in level 0 of its slide, and the pixels there along one of its own.

    Attributes:
        origin: x and y.
        scale: x and y.
    """

    origin: tuple[float, float] = (0.0, 0.0)
    scale: tuple[float, float] = (1.0, 1.0)

    def to_image(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of x and y in pixels of the image."""
        return (points - np.array(self.origin)) / np.array(self.scale)

    def to_slide(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of x and y in pixels of level 0."""
        return points * np.array(self.scale) + np.array(self.origin)


def placement_of(path: Path, downsample: int = 1) -> Placement:
    """The place of the image that `open_image` gives of a slide or of a store.

    A store says how `preprocess` shrank and cropped its slide; one without this (of another tool) is its own slide.
    """
    if not is_own_store(path):
        return Placement(scale=(float(downsample), float(downsample)))
    place = place_of_store(path).coarser(downsample)
    return Placement((place.origin[1], place.origin[0]), (place.scale[1], place.scale[0]))
