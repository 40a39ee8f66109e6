"""Segmentation: a class for each pixel, learnt from drawn regions, and its losses.

Losses are written with few operators, all of which run tile by tile: a term is a quotient of sums over the slide, so
the loss of a slide that is nowhere whole, and its gradient, are those of plain PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import AREA_SCORES, AreaPredictions
from wsi_trainer.models.targets import MultiTargetTask
from wsi_trainer.models.tasks import Cells, ClassWeights, Owners, Targets, Task, Weights, check_classes
from wsi_trainer.regions.target import IGNORED, Legend

SPACE = (2, 3)


@dataclass(frozen=True)
class Pixels:
    """Prediction and truth, pixel by pixel.

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


COLUMN = "regions"


class SegmentationTask(Task):
    """A class for each pixel. The manifest's column `regions` names the file of drawn regions of each slide.

    Files are GeoJSON (QuPath), XML (ASAP, CAMELYON, ImageScope, HALO) and label images (TIFF, OME-Zarr). An empty
    cell is a slide on which nothing is drawn.
    """

    dense = True
    legend: Legend
    target_name = COLUMN
    scores = AREA_SCORES
    columns: tuple[str, ...] = (COLUMN,)
    may_be_empty = True

    def __init__(
        self,
        classes: Sequence[str],
        drawn: dict[str, str] | None = None,
        unmarked: str | None = None,
        losses: dict[str, float] | None = None,
        class_weights: Weights = None,
        focus: float = 2.0,
        auxiliary: Task | None = None,
        auxiliary_weight: float = 1.0,
    ) -> None:
        """Build the task.

        Args:
            classes: The classes; the first is that of pixels on which nothing is drawn, unless `unmarked` says
                otherwise.
            drawn: Class of each name that regions have in the files, such as {_0: tumour, _2: normal}, or ignore
                for regions that say nothing; where regions overlap, the later name here lies on top. By default each
                class goes by its own name. In label images names are numbers.
            unmarked: Class of pixels on which nothing is drawn; ignore where slides are annotated in part.
            losses: Terms of the loss and their weights, of cross_entropy, dice and focal; by default
                {cross_entropy: 1, dice: 1}.
            class_weights: Weight of each class in every term; balanced weighs by how rare its pixels are among those
                of the training slides, which are counted before the first step.
            focus: Exponent of the focal loss; 0 makes it the cross-entropy, else it is 1 or more.
            auxiliary: Deprecated, of 1.0: the task of a second target, `label`; name both in `model.targets`.
            auxiliary_weight: Deprecated, of 1.0: its weight; `model.target_weights` has those of all.
        """
        super().__init__()
        self._second_of_1_0 = None if auxiliary is None else (auxiliary, auxiliary_weight)
        if auxiliary is not None:
            warnings.warn(
                "auxiliary of SegmentationTask is now a target of its own: model.targets names both, and "
                "model.target_weights its weight; version 2 removes it", DeprecationWarning, stacklevel=2,
            )  # fmt: skip
        self.classes = check_classes(classes)
        self.legend = Legend.of(self.classes, drawn, unmarked)
        self.outputs = len(self.classes)
        self.names = tuple(f"share_{name}" for name in self.classes)
        self.losses = _check_losses(losses or {"cross_entropy": 1.0, "dice": 1.0})
        self.weights = ClassWeights(class_weights, self.outputs)
        if not (focus == 0 or 1 <= focus < float("inf")):  # between them its slope has no bound
            raise ValueError(f"focus is {focus}; it must be 0, or 1 or more")
        self.focus = focus

    @property
    def whole(self) -> Task:
        if self._second_of_1_0 is None:
            return self
        second, weight = self._second_of_1_0
        return MultiTargetTask({COLUMN: self, Task.target_name: second}, {Task.target_name: weight})

    @property
    def pixels(self) -> SegmentationTask:
        return self

    def target(self, cells: Cells) -> Tensor:
        """One number: 1 where anything is drawn. The target of pixels is cut from the file tile by tile."""
        path = cells.get(COLUMN, "")
        if path and not Path(path).exists():
            raise UserError(f"has {COLUMN} {path!r}, which does not exist; leave it empty where nothing is drawn")
        return torch.tensor([float(bool(path))])

    def row(self, targets: Targets) -> Tensor:
        return torch.zeros(1)  # predictions of pixels are counted with what is drawn

    def stratum(self, cells: Cells) -> str:
        return "drawn" if cells.get(COLUMN, "") else "not drawn"

    def prepare_pixels(self, counts: Tensor) -> None:
        """Learn how many pixels of the training slides each class has."""
        self.weights.balance(counts)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of (1, classes, h, w) logits, and (1, 1, h, w) classes or `IGNORED`."""
        pixels = Pixels(logits, target[:, 0].long(), self.weights(logits), self.focus)
        terms = [weight * LOSSES[name](pixels) for name, weight in self.losses.items()]
        return torch.stack(terms).sum()

    def predict(self, logits: Tensor) -> Tensor:
        """The share of the slide that is predicted to be of each class."""
        found = one_hot(logits.argmax(dim=1), self.outputs)
        return found.sum(SPACE) / (logits.shape[2] * logits.shape[3])

    def areas(self, logits: Tensor, target: Tensor) -> Tensor:
        """(1, 3 · classes): pixels that are rightly predicted to be of each class, that are predicted, that are."""
        counted = target != IGNORED
        found = one_hot(logits.argmax(dim=1), self.outputs) & counted
        drawn = torch.cat([target == place for place in range(self.outputs)], dim=1)
        return torch.cat([part.sum(SPACE) for part in (found & drawn, found, drawn)], dim=1).to(torch.float64)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> AreaPredictions:
        counts = predicted.reshape(len(predicted), 3, self.outputs)
        return AreaPredictions(owners.slides, owners.patients, self.classes, counts, owners.sites)


def _check_losses(losses: Mapping[str, float]) -> dict[str, float]:
    for name, weight in losses.items():
        if name not in LOSSES:
            raise ValueError(f"losses names {name!r}; the terms are {', '.join(LOSSES)}")
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight of {name} in losses is {weight}; it must be 0 or positive")
    if not sum(losses.values()):
        raise ValueError("losses has no term with a weight above 0")
    return {name: float(weight) for name, weight in losses.items() if weight}
