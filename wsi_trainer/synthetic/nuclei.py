"""Nuclei: one at most in each cell of a jittered grid, drawn whole by every tile that they touch.

A nucleus depends on its cell only, so a nucleus that crosses the border of two tiles is the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lesions import Site
from .outline import Outline
from .spec import NORMAL_CONTRAST, STREAM_CELLS, SlideSpec
from .texture import Field, Textures, sample

CELL = 21  # px between grid nodes
GROUP = 32  # cells a side that share one draw of random numbers
REACH = 9  # no nucleus extends further than this from its centre
_COLUMNS = 9


@dataclass
class Nuclei:
    """Parameters of many nuclei, one entry for each, in the global order in which they are painted."""

    y: NDArray[np.float64]
    x: NDArray[np.float64]
    long: NDArray[np.float64]
    short: NDArray[np.float64]
    angle: NDArray[np.float64]
    density: NDArray[np.float64]
    contrast: NDArray[np.float64]
    texture_y: NDArray[np.int64]
    texture_x: NDArray[np.int64]


class NucleiField:
    """All nuclei of a slide, asked for box by box."""

    def __init__(self, spec: SlideSpec, outline: Outline, lesions: list[Site], clusters: list[Site]) -> None:
        self._spec = spec
        self._outline = outline
        self._lesions = lesions if spec.positive else []
        self._clusters = clusters

    def _draws(self, cells_y: range, cells_x: range) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Cell coordinates (n, 2) and their random numbers (n, columns), row by row."""
        groups_y = range(cells_y.start // GROUP, (cells_y.stop - 1) // GROUP + 1)
        groups_x = range(cells_x.start // GROUP, (cells_x.stop - 1) // GROUP + 1)
        rows = []
        for gy in groups_y:
            draw = [self._spec.rng(STREAM_CELLS, gy, gx).random((GROUP, GROUP, _COLUMNS)) for gx in groups_x]
            rows.append(np.concatenate(draw, 1))
        numbers = np.concatenate(rows, 0)
        top, left = groups_y.start * GROUP, groups_x.start * GROUP
        numbers = numbers[cells_y.start - top : cells_y.stop - top, cells_x.start - left : cells_x.stop - left]
        cells = np.stack(np.meshgrid(np.array(cells_y), np.array(cells_x), indexing="ij"), -1)
        return cells.reshape(-1, 2).astype(np.float64), numbers.reshape(-1, _COLUMNS)

    def near(self, y: int, x: int, height: int, width: int) -> Nuclei:
        """The nuclei that can touch a box."""
        cells_y = range(max(0, (y - REACH) // CELL - 1), (y + height + REACH) // CELL + 2)
        cells_x = range(max(0, (x - REACH) // CELL - 1), (x + width + REACH) // CELL + 2)
        cells, u = self._draws(cells_y, cells_x)
        cy = (cells[:, 0] + 0.5 + 0.8 * (u[:, 0] - 0.5)) * CELL
        cx = (cells[:, 1] + 0.5 + 0.8 * (u[:, 1] - 0.5)) * CELL
        chance = np.full(len(cy), 0.55)
        for site in self._clusters:
            chance[site.contains(cy, cx)] = 0.97
        keep = (u[:, 2] < chance) & (self._outline.amount_at(cy, cx) > 0.7)
        u, cy, cx = u[keep], cy[keep], cx[keep]
        contrast = np.full(len(cy), NORMAL_CONTRAST)
        for site in self._lesions:
            contrast[site.contains(cy, cx)] = self._spec.contrast
        long = 6.2 + 2.0 * u[:, 3]
        return Nuclei(
            y=cy,
            x=cx,
            long=long,
            short=long * (0.68 + 0.27 * u[:, 4]),
            angle=u[:, 5] * np.pi,
            density=0.95 + 0.35 * (u[:, 6] - 0.5),
            contrast=contrast,
            texture_y=(u[:, 7] * 65536).astype(np.int64),
            texture_x=(u[:, 8] * 65536).astype(np.int64),
        )


def paint(nuclei: Nuclei, textures: Textures, y: int, x: int, height: int, width: int) -> tuple[Field, Field]:
    """Density of stain and relative chromatin of the nuclei over a box.

    Later nuclei cover earlier ones, in the global order of the grid. Chromatin has mean zero over each
    nucleus, so that its mean colour does not depend on the contrast.
    """
    margin = 2 * REACH + 1
    density = np.zeros((height + 2 * margin, width + 2 * margin), np.float32)
    chromatin = np.zeros_like(density)
    if len(nuclei.y):
        span = np.arange(-REACH, REACH + 1)
        iy, ix = np.floor(nuclei.y).astype(np.int64), np.floor(nuclei.x).astype(np.int64)
        dy = (span[None, :] - (nuclei.y - iy)[:, None]).astype(np.float32)[:, :, None]
        dx = (span[None, :] - (nuclei.x - ix)[:, None]).astype(np.float32)[:, None, :]
        cover = _coverage(nuclei, dy, dx)
        rows = (nuclei.texture_y[:, None] + span)[:, :, None]
        cols = (nuclei.texture_x[:, None] + span)[:, None, :]
        grain = sample(textures.chromatin, rows, cols)
        grain = grain - ((grain * cover).sum((1, 2)) / cover.sum((1, 2)))[:, None, None]
        at_y = iy[:, None] + span - y + margin
        at_x = ix[:, None] + span - x + margin
        fits = ((at_y[:, 0] >= 0) & (at_y[:, -1] < density.shape[0])
                & (at_x[:, 0] >= 0) & (at_x[:, -1] < density.shape[1]))  # fmt: skip
        flat = (at_y[:, :, None] * density.shape[1] + at_x[:, None, :])[fits]
        touched = cover[fits] > 0
        where = flat[touched]
        density.reshape(-1)[where] = (cover * nuclei.density[:, None, None].astype(np.float32))[fits][touched]
        relative = cover * grain * nuclei.contrast[:, None, None].astype(np.float32)
        chromatin.reshape(-1)[where] = relative[fits][touched]
    inner = np.s_[margin : margin + height, margin : margin + width]
    return density[inner], chromatin[inner]


def _coverage(nuclei: Nuclei, dy: Field, dx: Field) -> Field:
    """Share of each pixel of each stamp that the ellipse covers, with a soft edge of one pixel."""
    cos = np.cos(nuclei.angle).astype(np.float32)[:, None, None]
    sin = np.sin(nuclei.angle).astype(np.float32)[:, None, None]
    long, short = (a.astype(np.float32)[:, None, None] for a in (nuclei.long, nuclei.short))
    along, across = dy * cos + dx * sin, dx * cos - dy * sin
    distance = np.sqrt((along / long) ** 2 + (across / short) ** 2)
    return np.clip((1 - distance) * short + 0.5, 0.0, 1.0)
