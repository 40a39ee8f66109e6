"""One label for each slide, out of classes that exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import SCORES, ClassPredictions
from wsi_trainer.models.tasks.base import Cells, Owners, Task, check_classes, check_smoothing
from wsi_trainer.models.tasks.weights import ClassWeights


class ClassTask(Task):
    """A task with named classes; the column `label` holds the name."""

    scores = SCORES

    def __init__(self, classes: Sequence[str], outputs: int) -> None:
        super().__init__()
        self.classes = check_classes(classes)
        self.names = tuple(f"probability_{name}" for name in self.classes)
        self.outputs = outputs

    def target(self, cells: Cells) -> Tensor:
        if cells["label"] not in self.classes:
            raise UserError(
                f"has the label {cells['label']!r}, which is none of the classes {', '.join(map(repr, self.classes))}; "
                "correct the manifest or the task's classes"
            )
        return torch.tensor([self.classes.index(cells["label"])])

    def stratum(self, cells: Cells) -> str:
        return cells["label"]

    def lack(self, targets: Tensor) -> str | None:
        present = [self.classes[int(index)] for index in targets.unique()]
        return f"slides of the class {present[0]!r} only" if len(present) == 1 else None

    def probabilities(self, logits: Tensor) -> Tensor:
        """The (N, classes) probabilities of the logits."""
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        return self.probabilities(logits)

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> ClassPredictions:
        labels = targets.astype(np.int64)
        return ClassPredictions(owners.slides, owners.patients, self.classes, labels, predicted, owners.sites)


class BinaryTask(ClassTask):
    """Two classes, one logit: the log odds of the second class."""

    def __init__(
        self,
        classes: Sequence[str] = ("0", "1"),
        positive_weight: float | Literal["balanced"] = 1.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """Build the task.

        Args:
            classes: The two labels as the manifest writes them, the negative one first.
            positive_weight: Weight of a positive slide in the loss, for classes of unequal size; balanced takes the
                number of negative training slides for each positive one.
            label_smoothing: Share of the target that is spread over both classes.
        """
        super().__init__(classes, outputs=1)
        if len(self.classes) != 2:
            raise ValueError(f"BinaryTask has two classes, not {list(classes)}; use MultiClassTask")
        self.weight = ClassWeights(
            "balanced" if positive_weight == "balanced" else [float(positive_weight)], 1, "positive_weight"
        )
        self.label_smoothing = check_smoothing(label_smoothing)

    def prepare(self, targets: Tensor) -> None:
        if self.weight.balanced and targets.any():
            self.weight.values.fill_(float((targets == 0).sum() / (targets == 1).sum()))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        truth = target.to(logits.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(logits[:, 0], truth, pos_weight=self.weight(logits))

    def probabilities(self, logits: Tensor) -> Tensor:
        positive = torch.sigmoid(logits)
        return torch.cat([1 - positive, positive], dim=1)


class MultiClassTask(ClassTask):
    """Several exclusive classes, one logit for each."""

    def __init__(
        self,
        classes: Sequence[str],
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        """Build the task.

        Args:
            classes: The labels as the manifest writes them.
            class_weights: Weight of each class in the loss; balanced weighs by how rare it is among the training
                slides.
            label_smoothing: Share of the target that is spread over all classes.
        """
        super().__init__(classes, outputs=len(classes))
        self.weights = ClassWeights(class_weights, len(classes))
        self.label_smoothing = check_smoothing(label_smoothing)

    def prepare(self, targets: Tensor) -> None:
        self.weights.balance(torch.bincount(targets, minlength=len(self.classes)))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # A single slide would be divided by its own weight again, which cancels it: weigh the plain mean instead.
        losses = functional.cross_entropy(
            logits, target, weight=self.weights(logits), label_smoothing=self.label_smoothing, reduction="none"
        )
        return losses.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=1)
