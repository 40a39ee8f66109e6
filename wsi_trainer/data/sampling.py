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
    """All slides in a new order each epoch; with several ranks each has its share, of equal length.

    It counts the epochs itself. Lightning's `set_epoch` comes too late for the first epoch of a resumed run,
    which would then be drawn as epoch 0 again.
    """

    def __init__(self, slides: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self.slides = slides
        self.seed = seed
        self.rank, self.ranks = rank, ranks
        self.epoch = 0
        """The epoch that is drawn next."""
        self.skip = 0
        """How many visits of it were made before, by the run that this one continues."""

    def __len__(self) -> int:
        return -(-self.slides // self.ranks)

    def __iter__(self) -> Iterator[Visit]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        skip, self.skip = self.skip, 0
        order = np.random.default_rng((self.seed, epoch)).permutation(self.slides)
        # No rank may run out of slides before the others: they would wait for its gradients for ever.
        shared = np.resize(order, len(self) * self.ranks)[self.rank :: self.ranks]
        return (Visit(int(slide), epoch) for slide in shared[skip:])


class InOrder(Sampler[Visit]):
    """All slides in the order of the manifest, or a rank's share of them."""

    def __init__(self, slides: int, rank: int = 0, ranks: int = 1) -> None:
        self.places = range(rank, slides, ranks)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Visit]:
        return (Visit(slide, 0) for slide in self.places)
