"""What spoils real slides, drawn onto pixels at a known place: ink, blur, pale tissue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Pixels = NDArray[np.uint8]
Light = NDArray[np.float32]
"""Grey levels, (height, width, 3)."""
INKS = {"black": (18, 17, 22), "blue": (25, 45, 150), "green": (20, 120, 70), "red": (205, 30, 45)}
"""Colours of felt pens on a white ground."""


@dataclass(frozen=True)
class Artefact:
    """One thing that is drawn.

    Attributes:
        outline: Its true place, in pixels of the slide.
        change: From the pixels of a slide to those that lie in it.
        soft: Standard deviation of its border in pixels.
    """

    outline: shapely.Polygon
    change: Callable[[Light], Light]
    soft: float


def spoilt(pixels: Pixels, *artefacts: Artefact) -> Pixels:
    """A slide with artefacts, the later ones over the earlier ones."""
    light = pixels.astype(np.float32)
    rows, columns = np.mgrid[: light.shape[0], : light.shape[1]] + 0.5
    for one in artefacts:
        shapely.prepare(one.outline)
        cover = shapely.contains_xy(one.outline, columns, rows).astype(np.float32)
        light += gaussian_filter(cover, one.soft)[..., None] * (one.change(light) - light)
    return np.clip(np.rint(light), 0, 255).astype(np.uint8)


def renderer(pixels: Pixels) -> Callable[[int, int, int, int], Pixels]:
    """Boxes of a picture, as files are written from."""
    return lambda y, x, height, width: pixels[y : y + height, x : x + width]


def stroke(corners: Sequence[tuple[float, float]], width: float) -> shapely.Polygon:
    """A line through corners (x and y), as wide as a pen."""
    return shapely.LineString(corners).buffer(width / 2)


def ink(outline: shapely.Polygon, colour: str, strength: float = 0.9) -> Artefact:
    """A pen mark: what is below shows through a little."""
    left = np.asarray(1 - strength * (1 - np.array(INKS[colour]) / 255), np.float32)
    return Artefact(outline, lambda light: np.asarray(light * left), soft=2.0)


def blur(outline: shapely.Polygon, sigma: float) -> Artefact:
    """A place out of focus."""
    return Artefact(outline, lambda light: np.asarray(gaussian_filter(light, (sigma, sigma, 0))), soft=2 * sigma)


def pale(outline: shapely.Polygon, glass: Pixels, left: float = 0.12) -> Artefact:
    """Tissue that took little stain."""
    ground = glass.astype(np.float32)
    return Artefact(outline, lambda light: ground + left * (light - ground), soft=6.0)
