"""A synthetic slide, any box of which is rendered from a seed and its position.

Textures: small arrays that repeat in both directions with prime periods, so no tile of a usual size ever meets the same
piece twice in a row. Outline: interpolated from a coarse lattice, so its bound over a box is the bound of a few nodes,
and a box of background is known as such without looking at its pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SlideSpec:
    """The parameters of one slide. Equal specs give equal pixels.

    Attributes:
        height, width: pixels at full resolution.
        seed: the data set's seed; textures are shared by all slides of a seed.
        slide: the slide's number in the data set: its shape, its nuclei, its lesion sites.
        patient: slides of one patient share the strength of their stains.
        positive: whether nuclei inside the lesion sites have lesion chromatin. Nothing else depends on it.
        noise: scanner noise everywhere, also on background. Without it background is one exact colour.
        mpp: micrometres per pixel, written to the file.
        tissue: the wanted share of the slide that is tissue, about.
        contrast: relative strength of chromatin in lesion nuclei (normal ones have ``NORMAL_CONTRAST``).
        stain: factors of the strength of haematoxylin and of eosin, those of a laboratory.
    """

    height: int
    width: int
    seed: int = 0
    slide: int = 0
    patient: int = 0
    positive: bool = False
    noise: bool = False
    mpp: float = 0.5
    tissue: float = 0.4
    contrast: float = 0.34
    stain: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 64:
            raise ValueError(f"a slide of {self.height} x {self.width} px is too small: both sides need 64 px or more")
        if not 0.02 <= self.tissue <= 0.9:
            raise ValueError(f"tissue={self.tissue} must lie between 0.02 and 0.9")
        if self.seed < 0 or self.slide < 0 or self.patient < 0:
            raise ValueError("seed, slide and patient must not be negative")
        if min(self.stain) <= 0:
            raise ValueError(f"stain={self.stain}: both factors must be above 0")

    def rng(self, stream: int, a: int = 0, b: int = 0) -> np.random.Generator:
        """Random numbers that belong to a place (a, b) of this slide and to nothing else."""
        key = [self.seed, (self.slide << 16) | stream]
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, a, b]))


NORMAL_CONTRAST = 0.07

# Streams: one number for each thing that is drawn, so that adding one changes no other.
STREAM_OUTLINE = 1
STREAM_LESIONS = 2
STREAM_CELLS = 3
STREAM_STAIN = 4
STREAM_CLUSTERS = 5
STREAM_OFFSETS = 6


Field = NDArray[np.float32]


def _band_passed(rng: np.random.Generator, shape: tuple[int, int], low: float, high: float, stretch: float) -> Field:
    """White noise kept between two frequencies (cycles per pixel), with mean 0 and standard deviation 1."""
    fy = np.fft.fftfreq(shape[0])[:, None]
    fx = np.fft.rfftfreq(shape[1])[None, :]
    radius = np.hypot(fy * stretch, fx)
    # Smooth shoulders: a sharp cut in frequency would ring in space.
    keep = np.exp(-((radius / high) ** 4)) * (1.0 - np.exp(-((radius / max(low, 1e-9)) ** 4)))
    spectrum = np.fft.rfft2(rng.random(shape) - 0.5)
    field = np.fft.irfft2(spectrum * keep, s=shape)
    field -= field.mean()
    return (field / field.std()).astype(np.float32)


class Textures:
    """The noise fields that all slides of one seed share; each slide reads them at its own offset."""

    def __init__(self, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, 0x7E47]))
        self.fibre = _band_passed(rng, (761, 769), 1 / 300, 1 / 14, stretch=3.0)
        self.slow = _band_passed(rng, (1217, 1223), 1 / 2000, 1 / 250, stretch=1.0)
        self.edge = _band_passed(rng, (509, 521), 1 / 400, 1 / 40, stretch=1.0)
        # Chromatin lives between periods of 2.2 and 4 px: averaging over 8 px leaves nothing of it.
        self.chromatin = np.clip(_band_passed(rng, (257, 263), 1 / 4.0, 1 / 2.4, stretch=1.0), -2.0, 2.0)
        self.scanner = np.clip(rng.standard_normal((503, 499, 3)), -4, 4).astype(np.float32)


@lru_cache(maxsize=4)
def textures(seed: int) -> Textures:
    """The fields of a seed; making them takes a tenth of a second, so they are kept."""
    return Textures(seed)


def window(field: Field, y: int, x: int, height: int, width: int) -> Field:
    """The piece of a periodic field whose upper left corner is at (y, x)."""
    rows = np.take(field, np.arange(y, y + height), axis=0, mode="wrap")
    return np.take(rows, np.arange(x, x + width), axis=1, mode="wrap")


def sample(field: Field, y: NDArray[np.int64], x: NDArray[np.int64]) -> Field:
    """The values of a periodic field at integer positions."""
    return field[y % field.shape[0], x % field.shape[1]]


STEP = 64
EDGE = 0.035  # how far the fine edge noise (clipped at two deviations) moves the outline
SOFT = 10.0  # how steeply tissue sets in


def _smooth_noise(rng: np.random.Generator, rows: int, cols: int, bumps: int) -> NDArray[np.float64]:
    """Noise with about ``bumps`` bumps along the longer side, between -1 and 1."""
    cell = max(rows, cols) / bumps
    grid = rng.random((int(rows / cell) + 3, int(cols / cell) + 3)) * 2 - 1
    y, x = np.arange(rows) / cell, np.arange(cols) / cell
    return _weights(y, grid.shape[0], smooth=True) @ grid @ _weights(x, grid.shape[1], smooth=True).T


def _weights(at: NDArray[np.float64], nodes: int, smooth: bool = False) -> NDArray[np.float64]:
    """Rows of interpolation weights of ``nodes`` lattice nodes at the positions ``at``."""
    low = np.clip(np.floor(at).astype(int), 0, nodes - 2)
    t = np.clip(at - low, 0.0, 1.0)
    if smooth:
        t = t * t * (3 - 2 * t)
    weights = np.zeros((len(at), nodes))
    rows = np.arange(len(at))
    weights[rows, low] = 1 - t
    weights[rows, low + 1] = t
    return weights


class Outline:
    """The tissue of one slide."""

    def __init__(self, spec: SlideSpec, textures: Textures, offset: tuple[int, int]) -> None:
        self._edge = textures.edge
        self._offset = offset
        self.lattice = self._make_lattice(spec)

    @staticmethod
    def _make_lattice(spec: SlideSpec) -> NDArray[np.float32]:
        rng = spec.rng(STREAM_OUTLINE)
        rows, cols = spec.height // STEP + 2, spec.width // STEP + 2
        y = (np.arange(rows) * STEP / spec.height)[:, None]
        x = (np.arange(cols) * STEP / spec.width)[None, :]
        field = np.full((rows, cols), -np.inf)
        for _ in range(int(rng.integers(1, 4))):
            cy, cx = rng.uniform(0.3, 0.7, 2)
            ry, rx = rng.uniform(0.22, 0.42, 2)
            angle = rng.uniform(0, np.pi)
            u = (y - cy) * np.cos(angle) + (x - cx) * np.sin(angle)
            v = (x - cx) * np.cos(angle) - (y - cy) * np.sin(angle)
            field = np.maximum(field, 1 - np.hypot(u / ry, v / rx))
        field += 0.30 * _smooth_noise(rng, rows, cols, 5) + 0.20 * _smooth_noise(rng, rows, cols, 13)
        # A rim of background on all sides, as a scanner leaves it.
        rim = np.minimum(np.minimum(y, 1 - y), np.minimum(x, 1 - x))
        field -= (1 - np.clip(rim / 0.2, 0, 1)) ** 2
        # The level that leaves the wanted share of tissue.
        level = np.quantile(field, 1 - spec.tissue)
        return np.minimum(field - level, (rim - 0.03) * 12).astype(np.float32)

    def _nodes(self, y: int, x: int, height: int, width: int) -> NDArray[np.float32]:
        return self.lattice[y // STEP : (y + height - 1) // STEP + 2, x // STEP : (x + width - 1) // STEP + 2]

    def is_background(self, y: int, x: int, height: int, width: int) -> bool:
        """True if no tissue touches the box. Never wrong; may be False for a box that only nearly is."""
        return bool(self._nodes(y, x, height, width).max() + 2 * EDGE <= 0)

    def amount(self, y: int, x: int, height: int, width: int) -> Field:
        """Cover of each pixel of a box by tissue, 0 to 1."""
        nodes = self._nodes(y, x, height, width)
        at_y = (np.arange(height) + y % STEP) / STEP
        at_x = (np.arange(width) + x % STEP) / STEP
        field = _weights(at_y, nodes.shape[0]).astype(np.float32) @ nodes
        field = field @ _weights(at_x, nodes.shape[1]).astype(np.float32).T
        edge = window(self._edge, y + self._offset[0], x + self._offset[1], height, width)
        field += EDGE * np.clip(edge, -2, 2)
        return np.clip(field * SOFT, 0.0, 1.0)

    def amount_at(self, y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same at single positions, which may lie anywhere."""
        rows, cols = self.lattice.shape
        fy = np.clip(y / STEP, 0, rows - 1.001)
        fx = np.clip(x / STEP, 0, cols - 1.001)
        iy, ix = fy.astype(int), fx.astype(int)
        ty, tx = fy - iy, fx - ix
        upper = self.lattice[iy, ix] * (1 - tx) + self.lattice[iy, ix + 1] * tx
        lower = self.lattice[iy + 1, ix] * (1 - tx) + self.lattice[iy + 1, ix + 1] * tx
        iy, ix = (
            np.floor(y).astype(np.int64) + self._offset[0],
            np.floor(x).astype(np.int64) + self._offset[1],
        )
        edge = EDGE * np.clip(sample(self._edge, iy, ix), -2, 2)
        return np.clip((upper * (1 - ty) + lower * ty + edge) * SOFT, 0.0, 1.0)


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


# Optical densities of haematoxylin and eosin in R, G, B, as scanned slides show them.
HAEMATOXYLIN = np.array([0.78, 0.92, 0.36], np.float32)
EOSIN = np.array([0.14, 0.88, 0.42], np.float32)
SCANNER_NOISE = 2.2  # standard deviation in grey levels


class SyntheticSlide:
    """A slide that is computed where it is looked at.

    Example:
        >>> slide = SyntheticSlide(SlideSpec(height=600, width=500))
        >>> slide.render(0, 0, 64, 64).shape
        (64, 64, 3)
    """

    def __init__(self, spec: SlideSpec) -> None:
        self.spec = spec
        self._textures = textures(spec.seed)
        offsets = (spec.rng(STREAM_OFFSETS).random(8) * 65536).astype(int)
        self._fibre_at, self._noise_at, self._slow_at = offsets[2:4], offsets[4:6], offsets[6:8]
        self._outline = Outline(spec, self._textures, (int(offsets[0]), int(offsets[1])))
        self.sites = lesion_sites(spec, self._outline)
        clusters = cluster_sites(spec, self._outline)
        self._nuclei = NucleiField(spec, self._outline, self.sites, clusters)
        self._stains(spec)

    def _stains(self, spec: SlideSpec) -> None:
        """The strength of both stains (by patient, with a little of the slide) and the colour of background."""
        patient = np.random.Generator(np.random.Philox(key=[spec.seed, 0xAA0000 + spec.patient])).random(3)
        own = spec.rng(STREAM_STAIN).random(3)
        self._haematoxylin = HAEMATOXYLIN * np.float32(spec.stain[0] * (0.95 + 0.25 * patient[0] + 0.08 * own[0]))
        self._eosin = EOSIN * np.float32(spec.stain[1] * (0.42 + 0.16 * patient[1] + 0.05 * own[1]))
        self.background = np.array([242, 241, 243], np.uint8) + np.uint8(4 * patient[2])

    def is_background(self, y: int, x: int, height: int, width: int) -> bool:
        """True if the box holds background only."""
        return self._outline.is_background(y, x, height, width)

    def render(self, y: int, x: int, height: int, width: int) -> NDArray[np.uint8]:
        """The pixels (height, width, 3) of the box whose upper left corner is at (y, x)."""
        if self.is_background(y, x, height, width):
            if not self.spec.noise:
                return np.broadcast_to(self.background, (height, width, 3))
            image = np.broadcast_to(self.background.astype(np.float32), (height, width, 3)).copy()
        else:
            image = self._tissue(y, x, height, width)
        if self.spec.noise:
            at = self._noise_at
            image += SCANNER_NOISE * window(self._textures.scanner, y + int(at[0]), x + int(at[1]), height, width)
        return np.clip(np.rint(image, out=image), 0, 255, out=image).astype(np.uint8)

    def _tissue(self, y: int, x: int, height: int, width: int) -> NDArray[np.float32]:
        amount = self._outline.amount(y, x, height, width)
        fibre = window(self._textures.fibre, y + int(self._fibre_at[0]), x + int(self._fibre_at[1]), height, width)
        slow = window(self._textures.slow, y + int(self._slow_at[0]), x + int(self._slow_at[1]), height, width)
        density, chromatin = paint(self._nuclei.near(y, x, height, width), self._textures, y, x, height, width)
        eosin = amount * np.clip(1 + 0.25 * fibre + 0.25 * slow, 0.2, 2.2)
        eosin *= 1 - 0.6 * np.minimum(density, 1)
        density += 0.07 * amount
        image = np.empty((height, width, 3), np.float32)
        for channel in range(3):
            light = np.exp(-self._haematoxylin[channel] * density - self._eosin[channel] * eosin)
            image[..., channel] = self.background[channel] * light * (1 + chromatin)
        return image
