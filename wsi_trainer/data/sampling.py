"""The order in which slides are visited: a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler


class Visit(NamedTuple):
    """Which slide, and in which epoch, which decides how it is augmented."""

    slide: int
    """Place in the list of slides."""
    epoch: int


class EpochSampler(Sampler[Visit]):
    """All slides in a new order each epoch.

    It counts the epochs itself. Lightning's `set_epoch` comes too late for the first epoch of a resumed run,
    which would then be drawn as epoch 0 again.
    """

    def __init__(self, slides: int, seed: int) -> None:
        self.slides = slides
        self.seed = seed
        self.epoch = 0
        """The epoch that is drawn next."""

    def __len__(self) -> int:
        return self.slides

    def __iter__(self) -> Iterator[Visit]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = np.random.default_rng((self.seed, epoch)).permutation(self.slides)
        return (Visit(int(slide), epoch) for slide in order)


class InOrder(Sampler[Visit]):
    """All slides in the order of the manifest."""

    def __init__(self, slides: int) -> None:
        self.slides = slides

    def __len__(self) -> int:
        return self.slides

    def __iter__(self) -> Iterator[Visit]:
        return (Visit(slide, 0) for slide in range(self.slides))
