"""The order in which slides are visited: a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler


class Visit(NamedTuple):
    """Which slide, and in which epoch, which decides how it is augmented."""

    slide: int
    """SlideTransform in the list of slides."""
    epoch: int


class EpochSampler(Sampler[Visit]):
    """All slides in a new order each epoch; with several ranks each has its share, of equal length.

    It counts the epochs itself. Lightning's `set_epoch` comes too late for the first epoch of a resumed run,
    which would then be drawn as epoch 0 again.

    With strata (the class of each slide) an epoch has as many visits as there are slides, and each class has its
    equal share of them: slides of a rare class are visited several times, of a frequent one only some are, and
    others in the next epoch.
    """

    def __init__(
        self, slides: int, seed: int, rank: int = 0, ranks: int = 1, strata: Sequence[str] | None = None
    ) -> None:
        if strata is not None and len(strata) != slides:
            raise ValueError(f"{len(strata)} strata for {slides} slides")
        self.slides = slides
        self.seed = seed
        self._classes = None if strata is None else _places(strata)
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
        order = self._order(epoch)
        # No rank may run out of slides before the others: they would wait for its gradients for ever.
        shared = np.resize(order, len(self) * self.ranks)[self.rank :: self.ranks]
        return (Visit(int(slide), epoch) for slide in shared[skip:])

    def _order(self, epoch: int) -> np.ndarray:
        """All visits of an epoch, a function of the seed and the epoch alone."""
        draw = np.random.default_rng((self.seed, epoch))
        if self._classes is None:
            return draw.permutation(self.slides)
        share, rest = divmod(self.slides, len(self._classes))
        visits = []
        for number, places in enumerate(self._classes):
            # What does not divide evenly goes to another class each epoch.
            wanted = share + ((number - epoch) % len(self._classes) < rest)
            rounds = [draw.permutation(places) for _ in range(-(-wanted // len(places)))]
            visits.append(np.concatenate(rounds)[:wanted] if rounds else places[:0])
        return draw.permutation(np.concatenate(visits))


def _places(strata: Sequence[str]) -> list[np.ndarray]:
    return [np.flatnonzero([stratum == name for stratum in strata]) for name in sorted(set(strata))]


class InOrder(Sampler[Visit]):
    """All slides in the order of the manifest, or a rank's share of them."""

    def __init__(self, slides: int, rank: int = 0, ranks: int = 1) -> None:
        self.places = range(rank, slides, ranks)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Visit]:
        return (Visit(slide, 0) for slide in self.places)
