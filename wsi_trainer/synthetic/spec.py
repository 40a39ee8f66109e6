"""Specification of a synthetic slide: everything its pixels depend on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SlideSpec:
    """The parameters of one slide. Equal specs give equal pixels.

    Attributes:
        height, width: pixels at full resolution.
        seed: the data set's seed; textures are shared by all slides of a seed.
        slide: the slide's number in the data set: its shape, its nuclei, its lesion sites.
        patient: slides of one patient share the strength of their stains.
        positive: whether nuclei inside the lesion sites have lesion chromatin. Nothing else depends on it.
        noise: scanner noise everywhere, also on glass. Without it glass is one exact colour.
        mpp: micrometres per pixel, written to the file.
        tissue: the wanted share of the slide that is tissue, about.
        contrast: relative strength of chromatin in lesion nuclei (normal ones have ``NORMAL_CONTRAST``).
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

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 64:
            raise ValueError(f"a slide of {self.height} x {self.width} px is too small: both sides need 64 px or more")
        if not 0.02 <= self.tissue <= 0.9:
            raise ValueError(f"tissue={self.tissue} must lie between 0.02 and 0.9")
        if self.seed < 0 or self.slide < 0 or self.patient < 0:
            raise ValueError("seed, slide and patient must not be negative")

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
