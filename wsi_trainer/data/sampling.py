"""The order in which slides are visited, and how each is held: a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from wsi_trainer.data.orientation import ORIENTATIONS


class Visit(NamedTuple):
    """Which slide, in which orientation."""

    slide: int
    """Place in the list of slides."""
    orientation: int


class EpochSampler(Sampler[Visit]):
    """All slides in a new order each epoch.

    It counts the epochs itself. Lightning's `set_epoch` comes too late for the first epoch of a resumed run,
    which would then be drawn as epoch 0 again.
    """

    def __init__(self, slides: int, seed: int, turn: bool) -> None:
        self.slides = slides
        self.seed = seed
        self.turn = turn
        self.epoch = 0
        """The epoch that is drawn next."""

    def __len__(self) -> int:
        return self.slides

    def __iter__(self) -> Iterator[Visit]:
        generator = np.random.default_rng((self.seed, self.epoch))
        self.epoch += 1
        order = generator.permutation(self.slides)
        orientations = generator.integers(0, ORIENTATIONS if self.turn else 1, self.slides)
        return (Visit(int(i), int(o)) for i, o in zip(order, orientations, strict=True))


class InOrder(Sampler[Visit]):
    """All slides in the order of the manifest, held as they are."""

    def __init__(self, slides: int) -> None:
        self.slides = slides

    def __len__(self) -> int:
        return self.slides

    def __iter__(self) -> Iterator[Visit]:
        return (Visit(index, 0) for index in range(self.slides))
