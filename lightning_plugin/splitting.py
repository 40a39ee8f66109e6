"""What a user says about splits, and where a map is split: positions and bounds, without any tensor or operator."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from lightning_plugin.errors import PlanError

#: Positions on one axis at which a map is split, its two ends included.
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Splitting:
    """A network is split from its image to a ``depth``: each axis of space into so many of ``counts`` splits.

    The depth is the path of a module, its own operators included, or a share of all window operators. ``wobble`` is how
    far a cut may lie from where even splits would have it, as a part of a split's side, and drawn anew in every step
    (the ω of Split-CNN); None is even splits.
    """

    counts: tuple[int, ...]
    depth: float | str
    wobble: float | None = None

    def __post_init__(self) -> None:
        if not self.counts or any(c < 1 for c in self.counts) or max(self.counts) == 1:
            raise ValueError(
                f"splits={self.counts}: at least one axis is cut into two splits or more, such as splits=2"
            )
        if not isinstance(self.depth, str) and not 0 < self.depth <= 1:
            raise ValueError(
                f"split_depth={self.depth}: a share of the network's window operators is more than 0 and at most 1; a "
                'path names a module, as split_depth="layer2" does'
            )
        if self.wobble is not None and not 0 <= self.wobble < 0.5:
            raise ValueError(f"wobble={self.wobble}: a cut stays on its own side of the next, so 0 <= wobble < 0.5")

    def count(self, axis: int) -> int:
        """Into how many splits an axis is cut; one number stands for all axes."""
        if len(self.counts) == 1:
            return self.counts[0]
        return self.counts[axis] if axis < len(self.counts) else 1

    def cuts(self, axis: int, size: int, key: int) -> Cuts:
        """Where a map is split whose splits no operator behind it says: evenly, or as this step's ``key`` has it.

        The i-th of N - 1 cuts is ⌊i·L/N⌋, or uniform among the whole numbers from ⌈(i-ω)·L/N⌉ to ⌊(i+ω)·L/N⌋;
        where there are none, it is even.
        """
        count = self.count(axis)
        if size < count:
            raise PlanError(
                f"a map of {size} positions on axis {axis} cannot be cut into {count} splits: give fewer splits, a "
                "smaller split_depth or a larger image"
            )
        dice = random.Random(f"{key} {axis} {size}")
        inner = []
        for i in range(1, count):
            even = i * size // count
            wobble = self.wobble or 0.0
            low, high = math.ceil((i - wobble) * size / count), math.floor((i + wobble) * size / count)
            inner.append(even if self.wobble is None or high < low else dice.randint(low, high))
        return (0, *inner, size)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.counts)) if len(self.counts) > 1 else f"{self.counts[0]} along each axis"
        until = f"'{self.depth}'" if isinstance(self.depth, str) else f"{100 * self.depth:g} % of the window operators"
        drawn = "" if self.wobble is None else f", cut anew in each step (wobble {self.wobble:g})"
        return f"splits {grid} up to {until}{drawn}"


def rising(cuts: Cuts) -> bool:
    """Whether every split has a position."""
    return all(a < b for a, b in itertools.pairwise(cuts))
