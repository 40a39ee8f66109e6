"""Tasks: what the numbers of the last layer mean, and how wrong they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Task(nn.Module):
    """One label for each slide, out of named classes."""

    def __init__(self, classes: Sequence[str], outputs: int) -> None:
        super().__init__()
        if len(set(classes)) != len(classes) or len(classes) < 2:
            raise ValueError(f"classes is {list(classes)}; give at least two different names")
        self.classes = tuple(classes)
        self.outputs = outputs

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss of (N, outputs) logits for (N,) indices of classes."""
        raise NotImplementedError

    def probabilities(self, logits: Tensor) -> Tensor:
        """The (N, classes) probabilities of the logits."""
        raise NotImplementedError


class BinaryTask(Task):
    """Two classes, one logit: the log odds of the second class."""

    def __init__(self, classes: Sequence[str] = ("0", "1"), positive_weight: float = 1.0) -> None:
        """Build the task.

        Args:
            classes: The two labels as the manifest writes them, the negative one first.
            positive_weight: Weight of a positive slide in the loss, for classes of unequal size.
        """
        super().__init__(classes, outputs=1)
        if len(self.classes) != 2:
            raise ValueError(f"BinaryTask has two classes, not {list(classes)}; use MultiClassTask")
        self.positive_weight = positive_weight

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        weight = torch.as_tensor(self.positive_weight, dtype=logits.dtype, device=logits.device)
        return functional.binary_cross_entropy_with_logits(logits[:, 0], target.to(logits.dtype), pos_weight=weight)

    def probabilities(self, logits: Tensor) -> Tensor:
        positive = torch.sigmoid(logits)
        return torch.cat([1 - positive, positive], dim=1)


class MultiClassTask(Task):
    """Several exclusive classes, one logit for each."""

    def __init__(
        self,
        classes: Sequence[str],
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        """Build the task.

        Args:
            classes: The labels as the manifest writes them.
            class_weights: Weight of each class in the loss.
            label_smoothing: Share of the target that is spread over all classes.
        """
        super().__init__(classes, outputs=len(classes))
        if class_weights is not None and len(class_weights) != len(classes):
            raise ValueError(f"class_weights has {len(class_weights)} numbers for {len(classes)} classes")
        self.class_weights = None if class_weights is None else tuple(class_weights)
        self.label_smoothing = label_smoothing

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        weight = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        # A single slide would be divided by its own weight again, which cancels it: weigh the plain mean
        # instead.
        losses = functional.cross_entropy(
            logits, target, weight=weight, label_smoothing=self.label_smoothing, reduction="none"
        )
        return losses.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=1)
