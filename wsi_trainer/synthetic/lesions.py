"""Sites inside the tissue: where lesions are on positive slides, and where nuclei crowd on any slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .outline import STEP, Outline
from .spec import STREAM_CLUSTERS, STREAM_LESIONS, SlideSpec


@dataclass(frozen=True)
class Site:
    """A star-shaped region: its radius is a smooth function of the angle."""

    y: float
    x: float
    radius: float
    phase: tuple[float, float]

    def _radius_at(self, angle: NDArray[np.float64]) -> NDArray[np.float64]:
        wobble = 0.18 * np.sin(2 * angle + self.phase[0]) + 0.10 * np.sin(3 * angle + self.phase[1])
        return self.radius * (1 + wobble)

    def contains(self, y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The positions that lie inside."""
        dy, dx = y - self.y, x - self.x
        return np.hypot(dy, dx) < self._radius_at(np.arctan2(dy, dx))

    def polygon(self, points: int = 64) -> NDArray[np.float64]:
        """The outline as (x, y) rows, closed, for GeoJSON."""
        angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
        radius = self._radius_at(angle)
        ring = np.stack([self.x + radius * np.cos(angle), self.y + radius * np.sin(angle)], 1)
        return np.concatenate([ring, ring[:1]])


def _sites(
    spec: SlideSpec, outline: Outline, stream: int, count: tuple[int, int], radius: tuple[float, float]
) -> list[Site]:
    """Sites whose centres lie well inside the tissue."""
    rng = spec.rng(stream)
    tissue = outline.lattice[outline.lattice > 0]
    inside = np.argwhere(outline.lattice > np.quantile(tissue, 0.4)) if tissue.size else np.empty((0, 2), int)
    if not len(inside):  # a slide of a few nodes: the one with most tissue
        inside = np.array([np.unravel_index(outline.lattice.argmax(), outline.lattice.shape)])
    side = min(spec.height, spec.width)
    sites = []
    for _ in range(int(rng.integers(count[0], count[1] + 1))):
        row, col = inside[int(rng.random() * len(inside))]
        jitter = (rng.random(2) - 0.5) * STEP
        size = min(rng.uniform(*radius), side / 8)
        phase = rng.random(2) * 2 * np.pi
        y, x = float(row * STEP + jitter[0]), float(col * STEP + jitter[1])
        sites.append(Site(y, x, float(size), (float(phase[0]), float(phase[1]))))
    return sites


def lesion_sites(spec: SlideSpec, outline: Outline) -> list[Site]:
    """The lesion sites of a slide; on a negative slide the same places hold normal nuclei."""
    return _sites(spec, outline, STREAM_LESIONS, (3, 5), (110.0, 170.0))


def cluster_sites(spec: SlideSpec, outline: Outline) -> list[Site]:
    """Places where nuclei crowd, visible at any magnification and unrelated to the label: decoys."""
    return _sites(spec, outline, STREAM_CLUSTERS, (2, 6), (80.0, 220.0))
