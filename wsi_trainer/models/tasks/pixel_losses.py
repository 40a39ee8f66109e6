"""Losses of a class for each pixel, of one slide.

They are written with operators that run tile by tile: a term is a quotient or a product of sums over the slide, so the
loss of a slide that is nowhere whole, and its gradient, are those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SPACE = (2, 3)


@dataclass(frozen=True)
class Pixels:
    """What the network says and what is true, pixel by pixel.

    Attributes:
        logits: (1, classes, height, width).
        target: (1, height, width): the place of the class; any class where a pixel does not count.
        counts: (1, height, width): 1 where a pixel counts, 0 where it is ignored.
        weights: (classes,).
        focus: The exponent of the focal loss.
    """

    logits: Tensor
    target: Tensor
    counts: Tensor
    weights: Tensor
    focus: float

    @property
    def weight(self) -> Tensor:
        """(1, height, width): the weight of each pixel, that of its class; 0 where it does not count."""
        return self.weights[self.target] * self.counts


def _mean(each: Tensor, pixels: Pixels) -> Tensor:
    """The mean over the pixels by their weight; 0 where none counts, as on a slide that is ignored throughout."""
    weight = pixels.weight
    total = weight.sum()
    return (each * weight).sum() / torch.where(total > 0, total, torch.ones_like(total))


def cross_entropy(pixels: Pixels) -> Tensor:
    """The mean of −log p of the true class."""
    return _mean(functional.cross_entropy(pixels.logits, pixels.target, reduction="none"), pixels)


def focal(pixels: Pixels) -> Tensor:
    """The mean of −(1 − p)^focus · log p of the true class: what is sure and right hardly counts."""
    surprise = functional.cross_entropy(pixels.logits, pixels.target, reduction="none")
    return _mean((1 - torch.exp(-surprise)) ** pixels.focus * surprise, pixels)


def dice(pixels: Pixels) -> Tensor:
    """One minus the Dice coefficient of probabilities and truth over the slide, the mean over the classes by weight.

    Sums are of the whole slide, so that a lesion counts the same wherever tiles cut it. One pixel is added to both
    sides: a class that is neither there nor predicted has a coefficient of 1.
    """
    counts = pixels.counts[:, None]
    probability = torch.softmax(pixels.logits, dim=1) * counts
    truth = one_hot(pixels.target, pixels.logits.shape[1]).to(probability.dtype) * counts
    both = (probability * truth).sum(SPACE)
    each = (2 * both + 1) / (probability.sum(SPACE) + truth.sum(SPACE) + 1)
    return 1 - (each * pixels.weights).sum() / pixels.weights.sum()


def one_hot(target: Tensor, classes: int) -> Tensor:
    """(1, classes, height, width): where each class is."""
    return torch.stack([target == place for place in range(classes)], dim=1)


LOSSES: Mapping[str, Callable[[Pixels], Tensor]] = {"cross_entropy": cross_entropy, "dice": dice, "focal": focal}
"""The terms of a loss by name."""
