"""Losses of a class for each pixel, of one slide.

They are written with few operators, all of which run tile by tile: a term is a quotient of sums over the slide, so the
loss of a slide that is nowhere whole, and its gradient, are those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from wsi_trainer.regions import IGNORED

SPACE = (2, 3)


@dataclass(frozen=True)
class Pixels:
    """What the network says and what is true, pixel by pixel.

    Attributes:
        logits: (1, classes, height, width).
        target: (1, height, width): the place of the class, or `IGNORED`.
        weights: (classes,).
        focus: The exponent of the focal loss.
    """

    logits: Tensor
    target: Tensor
    weights: Tensor
    focus: float

    @cached_property
    def truth(self) -> Tensor:
        """(1, classes, height, width): 1 where each class is; an ignored pixel is of none."""
        return one_hot(self.target, self.logits.shape[1]).to(self.logits.dtype)

    @cached_property
    def drawn(self) -> Tensor:
        """(1, classes): how many pixels each class has."""
        return self.truth.sum(SPACE)

    @cached_property
    def total(self) -> Tensor:
        """The weight of all pixels that count; 1 where none does, as on a slide that is ignored throughout."""
        total = (self.drawn * self.weights).sum()
        return torch.where(total > 0, total, torch.ones_like(total))


def cross_entropy(pixels: Pixels) -> Tensor:
    """The mean of −log p of the true class, by the weights of the classes."""
    return _surprise(pixels, pixels.weights).sum() / pixels.total


def _surprise(pixels: Pixels, weights: Tensor | None) -> Tensor:
    """(1, height, width): −log p of the true class, by its weight; 0 where a pixel is ignored."""
    return functional.cross_entropy(
        pixels.logits, pixels.target, weight=weights, ignore_index=IGNORED, reduction="none"
    )


def focal(pixels: Pixels) -> Tensor:
    """The mean of −(1 − p)^focus · log p of the true class: what is sure and right hardly counts."""
    unsure = 1 - torch.exp(-_surprise(pixels, None))
    return (unsure**pixels.focus * _surprise(pixels, pixels.weights)).sum() / pixels.total


def dice(pixels: Pixels) -> Tensor:
    """One minus the Dice coefficient of probabilities and truth over the slide, the mean over the classes by weight.

    Sums are of the whole slide, so that a lesion counts the same wherever tiles cut it. One pixel is added to both
    sides: a class that is neither there nor predicted has a coefficient of 1.
    """
    probability = torch.softmax(pixels.logits, dim=1)
    both = (probability * pixels.truth).sum(SPACE)
    said = (probability * pixels.truth.sum(dim=1, keepdim=True)).sum(SPACE)
    each = (2 * both + 1) / (said + pixels.drawn + 1)
    return 1 - (each * pixels.weights).sum() / pixels.weights.sum()


def one_hot(target: Tensor, classes: int) -> Tensor:
    """(1, classes, height, width): where each class is."""
    return torch.stack([target == place for place in range(classes)], dim=1)


LOSSES: Mapping[str, Callable[[Pixels], Tensor]] = {"cross_entropy": cross_entropy, "dice": dice, "focal": focal}
"""The terms of a loss by name."""
