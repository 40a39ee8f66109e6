"""Labels that do not exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import MULTI_LABEL_SCORES, MultiLabelPredictions
from wsi_trainer.models.tasks.base import Cells, Owners, Task, check_smoothing, yes_or_no
from wsi_trainer.models.tasks.weights import ClassWeights


class MultiLabelTask(Task):
    """Each class applies or not, by itself: one logit and one column of the manifest for each.

    A column holds 0 or 1, or nothing where it is not known; what is not known counts for nothing in loss and scores.
    """

    scores = MULTI_LABEL_SCORES
    may_be_empty = True

    def __init__(
        self,
        classes: Sequence[str],
        positive_weights: Sequence[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        """Build the task.

        Args:
            classes: Columns of the manifest, one for each label.
            positive_weights: Weight in the loss of a slide to which a label applies, for each label; balanced takes
                the number of training slides to which it does not apply for each one to which it does.
            label_smoothing: Share of the target that is spread over both answers.
        """
        super().__init__()
        if not classes or len(set(classes)) != len(classes):
            raise ValueError(f"classes is {list(classes)}; give different names, at least one")
        self.classes = self.columns = tuple(classes)
        self.names = tuple(f"probability_{name}" for name in classes)
        self.outputs = len(classes)
        self.weights = ClassWeights(positive_weights, len(classes), "positive_weights")
        self.label_smoothing = check_smoothing(label_smoothing)

    def target(self, cells: Cells) -> Tensor:
        values = [float(yes_or_no(cells, name)) if cells[name] else float("nan") for name in self.classes]
        if all(np.isnan(values)):
            raise UserError(f"has no label at all in the columns {', '.join(self.classes)}; fill in one")
        return torch.tensor([values])

    def stratum(self, cells: Cells) -> str:
        return ""  # most combinations of labels are too rare to be kept in proportion; each by itself is not

    def marks(self, cells: Cells) -> tuple[str, ...]:
        return tuple(name for name in self.classes if cells[name] and yes_or_no(cells, name))

    def prepare(self, targets: Tensor) -> None:
        if self.weights.balanced:
            positive, negative = (targets == 1).sum(0), (targets == 0).sum(0)
            self.weights.values.copy_(torch.where(positive > 0, negative / positive.clamp(min=1), 1.0))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        truth = target.nan_to_num().to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = functional.binary_cross_entropy_with_logits(
            logits, truth, pos_weight=self.weights(logits), reduction="none"
        )
        return (losses * known).sum() / known.sum().clamp(min=1)

    def predict(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> MultiLabelPredictions:
        return MultiLabelPredictions(owners.slides, owners.patients, self.classes, targets, predicted, owners.sites)
