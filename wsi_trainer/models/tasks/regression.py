"""A number for each slide."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_trainer.metrics import VALUE_SCORES, ValuePredictions
from wsi_trainer.models.tasks.base import Cells, Owners, Task, number


class RegressionTask(Task):
    """One number, which the network learns in units of the training slides' mean and standard deviation."""

    scores = VALUE_SCORES
    names = ("value",)
    outputs = 1

    def __init__(self, column: str = "label", loss: Literal["squared", "huber", "absolute"] = "squared") -> None:
        """Build the task.

        Args:
            column: Column of the manifest with the number.
            loss: The distance that is made small, in standard deviations of the training slides: squared, absolute,
                or huber, which is squared up to one standard deviation and absolute beyond.
        """
        super().__init__()
        self.columns = (column,)
        self.distance = loss
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.centre: Tensor
        self.scale: Tensor

    def target(self, cells: Cells) -> Tensor:
        return torch.tensor([number(cells, self.columns[0])])

    def stratum(self, cells: Cells) -> str:
        return ""

    def prepare(self, targets: Tensor) -> None:
        spread = float(targets.double().std(correction=0)) if len(targets) > 1 else 0.0
        self.centre.fill_(float(targets.double().mean()))
        self.scale.fill_(spread or 1.0)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        truth = (target.to(logits.dtype) - self.centre.to(logits.dtype)) / self.scale.to(logits.dtype)
        if self.distance == "squared":
            return functional.mse_loss(logits[:, 0], truth)
        if self.distance == "absolute":
            return functional.l1_loss(logits[:, 0], truth)
        return functional.huber_loss(logits[:, 0], truth)

    def predict(self, logits: Tensor) -> Tensor:
        return logits * self.scale.to(logits.dtype) + self.centre.to(logits.dtype)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> ValuePredictions:
        return ValuePredictions(owners.slides, owners.patients, targets, predicted[:, 0], owners.sites)
