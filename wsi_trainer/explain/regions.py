"""Drawn regions, and how much of a map falls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.path import Path as Outline
from scipy.ndimage import binary_dilation

from wsi_trainer.regions import Region

if TYPE_CHECKING:
    from wsi_trainer.explain.attribution import Attribution

Rings = list[list[tuple[float, float]]]


def rings_of(region: Region) -> Rings:
    """The corners of a drawn region, an outline and its holes."""
    return [[(float(x), float(y)) for x, y in ring] for ring in region.rings]


def mask_of(regions: list[Rings], shape: tuple[int, int], stride: int, margin: float = 0.0) -> np.ndarray:
    """Which positions of a map of this shape lie in a region, or within `margin` pixels of one."""
    mask = np.zeros(shape, dtype=bool)
    for outline, *holes in regions:
        inside = _centres_inside(outline, shape, stride)
        for hole in holes:
            inside &= ~_centres_inside(hole, shape, stride)
        mask |= inside
    steps = int(np.ceil(margin / stride))
    if steps and mask.any():
        reach = np.arange(-steps, steps + 1)
        disc = (reach[:, None] ** 2 + reach**2) * stride**2 <= margin**2
        mask = binary_dilation(mask, disc)
    return mask


def _centres_inside(ring: list[tuple[float, float]], shape: tuple[int, int], stride: int) -> np.ndarray:
    """The positions whose centre the ring holds; only those near it are looked at."""
    corners = np.array(ring) / stride - 0.5  # in positions: the centre of the first lies half a stride inside
    low = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, shape[::-1])
    high = np.clip(np.ceil(corners.max(axis=0)).astype(int) + 1, low, shape[::-1])
    columns, rows = np.meshgrid(np.arange(low[0], high[0]), np.arange(low[1], high[1]))
    inside = np.zeros(shape, dtype=bool)
    points = np.stack([columns.ravel(), rows.ravel()], axis=1)
    inside[rows.ravel(), columns.ravel()] = Outline(corners).contains_points(points)
    return inside


@dataclass(frozen=True)
class Shares:
    """How much of a map lies in the true regions or near them."""

    mass: float
    """Of what speaks for the class; NaN where nothing does."""
    area: float
    """Of the map's positions: the mass that a map without any aim would have there."""


def shares_inside(attribution: Attribution, regions: list[Rings], margin: float) -> Shares:
    """The shares in the regions and within `margin` pixels of them."""
    values = attribution.positive.double().cpu().numpy()
    mask = mask_of(regions, (values.shape[0], values.shape[1]), attribution.stride, margin)
    total = values.sum()
    return Shares(float(values[mask].sum() / total) if total else float("nan"), float(mask.mean()))


def sentence_on_regions(facts: dict[str, Any]) -> str:
    """What heatmaps.json says about the true regions, as a sentence; empty where none are known."""
    if not facts.get("annotated_slides"):
        return ""
    mass, area, field = facts["mass_inside"], facts["area_inside"], facts["receptive_field"]
    return (
        f"{100 * mass:.0f} % of what speaks for {facts['class']!r} lies in the true regions or within one receptive "
        f"field ({field} px) of them, which are {100 * area:.0f} % of the area (mean over "
        f"{facts['annotated_slides']} slides)"
    )
