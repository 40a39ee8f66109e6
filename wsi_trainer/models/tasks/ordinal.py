"""Ordered classes: one logit and the thresholds between the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.metrics import ORDINAL_SCORES
from wsi_trainer.models.tasks.classes import ClassTask
from wsi_trainer.models.tasks.weights import ClassWeights


class OrdinalTask(ClassTask):
    """A cumulative link model: P(class > k) = sigmoid(logit − θₖ), with learnt θ₁ < θ₂ < ...

    The slide has one place on an axis that the thresholds cut into the classes, so that a grade between two others is
    never less probable than both because of how the classes were trained one by one.
    """

    scores = ORDINAL_SCORES

    def __init__(
        self, classes: Sequence[str], class_weights: Sequence[float] | Literal["balanced"] | None = None
    ) -> None:
        """Build the task.

        Args:
            classes: The labels as the manifest writes them, from the lowest to the highest.
            class_weights: Weight of each class in the loss; balanced weighs by how rare it is among the training
                slides.
        """
        super().__init__(classes, outputs=1)
        self.weights = ClassWeights(class_weights, len(self.classes))
        steps = len(self.classes) - 1
        self.first = nn.Parameter(torch.tensor([-(steps - 1) / 2]))  # thresholds one apart, around 0
        self.gaps = nn.Parameter(torch.full((steps - 1,), 0.5413))  # softplus(0.5413) = 1

    @property
    def thresholds(self) -> Tensor:
        """(classes − 1,) in rising order."""
        return torch.cat([self.first, self.first + functional.softplus(self.gaps).cumsum(0)])

    def prepare(self, targets: Tensor) -> None:
        self.weights.balance(torch.bincount(targets, minlength=len(self.classes)))

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The (N, classes) logarithms of the probabilities.

        With a = logit − θₖ and b = logit − θₖ₊₁ a class has σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)), which does not
        cancel where both are near 1.
        """
        thresholds = self.thresholds.to(logits.dtype)
        above = functional.logsigmoid(logits - thresholds)  # log P(class > k)
        below = functional.logsigmoid(thresholds - logits)  # log P(class <= k)
        between = above[:, :-1] + below[:, 1:] + torch.log(-torch.expm1(thresholds[:-1] - thresholds[1:]))
        return torch.cat([below[:, :1], between, above[:, -1:]], dim=1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = functional.nll_loss(
            self.log_probabilities(logits), target, weight=self.weights(logits), reduction="none"
        )
        return losses.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return self.log_probabilities(logits).exp()
