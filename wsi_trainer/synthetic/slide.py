"""One synthetic slide: any box of it is a pure function of its spec and the position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .lesions import cluster_sites, lesion_sites
from .nuclei import NucleiField, paint
from .outline import Outline
from .spec import STREAM_OFFSETS, STREAM_STAIN, SlideSpec
from .texture import textures, window

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
        """The strength of both stains (by patient, with a little of the slide) and the colour of glass."""
        patient = np.random.Generator(np.random.Philox(key=[spec.seed, 0xAA0000 + spec.patient])).random(3)
        own = spec.rng(STREAM_STAIN).random(3)
        self._haematoxylin = HAEMATOXYLIN * np.float32(0.95 + 0.25 * patient[0] + 0.08 * own[0])
        self._eosin = EOSIN * np.float32(0.42 + 0.16 * patient[1] + 0.05 * own[1])
        self.glass = np.array([242, 241, 243], np.uint8) + np.uint8(4 * patient[2])

    def is_glass(self, y: int, x: int, height: int, width: int) -> bool:
        """True if the box holds glass only."""
        return self._outline.is_glass(y, x, height, width)

    def render(self, y: int, x: int, height: int, width: int) -> NDArray[np.uint8]:
        """The pixels (height, width, 3) of the box whose upper left corner is at (y, x)."""
        if self.is_glass(y, x, height, width):
            if not self.spec.noise:
                return np.broadcast_to(self.glass, (height, width, 3))
            image = np.broadcast_to(self.glass.astype(np.float32), (height, width, 3)).copy()
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
            image[..., channel] = self.glass[channel] * light * (1 + chromatin)
        return image
