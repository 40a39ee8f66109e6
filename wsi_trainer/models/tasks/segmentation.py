"""A class for each pixel, learnt from drawn regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import AREA_SCORES, AreaPredictions
from wsi_trainer.models.tasks.base import Cells, Owners, Task, check_classes
from wsi_trainer.models.tasks.pixel_losses import LOSSES, SPACE, Pixels, one_hot
from wsi_trainer.models.tasks.weights import ClassWeights, Weights
from wsi_trainer.regions import IGNORED, Legend

COLUMN = "regions"


class SegmentationTask(Task):
    """A class for each pixel. The manifest's column `regions` names the file of drawn regions of each slide.

    Files are GeoJSON (QuPath), XML (ASAP, CAMELYON, ImageScope, HALO) and label images (TIFF, OME-Zarr). An empty
    cell is a slide on which nothing is drawn.
    """

    dense = True
    scores = AREA_SCORES
    columns = (COLUMN,)
    may_be_empty = True

    def __init__(
        self,
        classes: Sequence[str],
        drawn: dict[str, str] | None = None,
        unmarked: str | None = None,
        losses: dict[str, float] | None = None,
        class_weights: Weights = None,
        focus: float = 2.0,
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
        """
        super().__init__()
        self.classes = check_classes(classes)
        self.legend = Legend.of(self.classes, drawn, unmarked)
        self.outputs = len(self.classes)
        self.names = tuple(f"share_{name}" for name in self.classes)
        self.losses = _check_losses(losses or {"cross_entropy": 1.0, "dice": 1.0})
        self.weights = ClassWeights(class_weights, self.outputs)
        if not (focus == 0 or 1 <= focus < float("inf")):  # between them its slope has no bound
            raise ValueError(f"focus is {focus}; it must be 0, or 1 or more")
        self.focus = focus

    def target(self, cells: Cells) -> Tensor:
        """Whether anything is drawn; the target itself is cut from the file as tiles are read."""
        path = cells.get(COLUMN, "")
        if path and not Path(path).exists():
            raise UserError(f"has {COLUMN} {path!r}, which does not exist; leave it empty where nothing is drawn")
        return torch.tensor([float(bool(path))])

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
