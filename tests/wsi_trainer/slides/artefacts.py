"""What spoils real slides, drawn onto any picture at a known place: ink, blur, folds, bubbles, pale tissue.

Each is an outline, which is the truth, and what it does to the pixels in it. A box of the spoilt slide depends on its
position alone, like one of the slide below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from wsi_trainer.regions.shapes import edges_of, fill

Pixels = NDArray[np.uint8]
Light = NDArray[np.float32]
"""Grey levels, (height, width, 3)."""
Render = Callable[[int, int, int, int], Pixels]

INKS = {"black": (18, 17, 22), "blue": (25, 45, 150), "green": (20, 120, 70), "red": (205, 30, 45)}
"""Colours of felt pens on a white ground."""


@dataclass(frozen=True)
class Artefact:
    """One thing that is drawn.

    Attributes:
        rule: The name of the rule that looks for such things.
        outline: Where it is, in pixels of the slide.
        change: From the pixels around it, their upper left corner (y and x), to those in it.
        reach: Pixels around a box that `change` sees.
        soft: Standard deviation of its border in pixels.
    """

    rule: str
    outline: shapely.Polygon
    change: Callable[[Light, int, int], Light]
    reach: int = 0
    soft: float = 0.0


class Spoilt:
    """A slide with artefacts, the later ones over the earlier ones."""

    def __init__(self, render: Render, shape: tuple[int, int], artefacts: Sequence[Artefact]) -> None:
        self._render, self._shape, self.artefacts = render, shape, list(artefacts)
        self._edges = [
            edges_of(tuple(np.array(ring.coords) for ring in (one.outline.exterior, *one.outline.interiors)))
            for one in self.artefacts
        ]
        self._reach = sum(one.reach + int(4 * one.soft) for one in self.artefacts)

    def render(self, y: int, x: int, height: int, width: int) -> Pixels:
        """The pixels of a box inside the slide."""
        near = [n for n, one in enumerate(self.artefacts) if self._meets(one, y, x, height, width)]
        if not near:
            return self._render(y, x, height, width)
        top, left = max(0, y - self._reach), max(0, x - self._reach)
        bottom = min(self._shape[0], y + height + self._reach)
        right = min(self._shape[1], x + width + self._reach)
        light = self._render(top, left, bottom - top, right - left).astype(np.float32)
        for number in near:
            self._change(light, top, left, number)
        part = light[y - top : y - top + height, x - left : x - left + width]
        return np.clip(np.rint(part), 0, 255).astype(np.uint8)

    def _change(self, light: Light, top: int, left: int, number: int) -> None:
        """Draws one of them into pixels with this upper left corner, and touches no more of them than it has to."""
        one = self.artefacts[number]
        margin = one.reach + int(4 * one.soft) + 1
        x0, y0, x1, y1 = (int(value) for value in one.outline.bounds)
        first, begin = max(0, y0 - margin - top), max(0, x0 - margin - left)
        part = light[first : max(first, y1 + margin + 1 - top), begin : max(begin, x1 + margin + 1 - left)]
        if not part.size:
            return
        corner = (top + first, left + begin)
        cover = fill(self._edges[number], corner, (corner[0] + part.shape[0], corner[1] + part.shape[1]))
        weight = cover.astype(np.float32)
        if one.soft:
            weight = gaussian_filter(weight, one.soft)
        part += weight[..., None] * (one.change(part, *corner) - part)

    def _meets(self, one: Artefact, y: int, x: int, height: int, width: int) -> bool:
        margin = self._reach + 8
        left, top, right, bottom = one.outline.bounds
        return bool(
            left < x + width + margin and right > x - margin and top < y + height + margin and bottom > y - margin
        )


def stroke(corners: Sequence[tuple[float, float]], width: float) -> shapely.Polygon:
    """A line through corners (x and y), as wide as a pen."""
    return shapely.LineString(corners).buffer(width / 2)


def ring(x: float, y: float, radius: float, width: float) -> shapely.Polygon:
    """A circle drawn with a pen."""
    return shapely.Point(x, y).buffer(radius, 64).exterior.buffer(width / 2)


def ink(outline: shapely.Polygon, colour: str, strength: float = 0.9) -> Artefact:
    """A pen mark: what is below shows through a little."""
    left = np.asarray(1 - strength * (1 - np.array(INKS[colour]) / 255), np.float32)
    return Artefact("pen", outline, lambda light, y, x: np.asarray(light * left), soft=2.0)


def blur(outline: shapely.Polygon, sigma: float) -> Artefact:
    """A place out of focus."""
    reach = int(4 * sigma) + 1
    return Artefact(
        "blur", outline, lambda light, y, x: np.asarray(gaussian_filter(light, (sigma, sigma, 0))), reach, 2 * sigma
    )


def fold(outline: shapely.Polygon, shift: int, glass: NDArray[np.uint8]) -> Artefact:
    """A fold: the tissue takes its light, and that which lies folded over it takes its own."""
    ground = glass.astype(np.float32)

    def twice(light: Light, y: int, x: int) -> Light:
        return np.asarray(light * np.minimum(np.roll(light, shift, axis=(0, 1)) / ground, 1) ** 1.1, np.float32)

    return Artefact("fold", outline, twice, reach=shift, soft=3.0)


def rim(outline: shapely.Polygon, light: tuple[float, float, float] = (0.52, 0.48, 0.45)) -> Artefact:
    """An edge of the cover glass or the rim of a bubble: grey with a tinge of brown, whatever lies below."""
    return Artefact("edge", outline, lambda below, y, x: below * np.array(light, np.float32), soft=3.0)


def pale(outline: shapely.Polygon, glass: NDArray[np.uint8], left: float = 0.12) -> Artefact:
    """Tissue that took little stain."""
    ground = glass.astype(np.float32)
    return Artefact("pale", outline, lambda light, y, x: ground + left * (light - ground), soft=6.0)
