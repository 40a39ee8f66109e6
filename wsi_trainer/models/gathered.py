"""What the model said of all slides of an epoch, on all devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Gathered(Metric):
    """Keeps targets and predictions until the end of the epoch; with several devices those of all."""

    full_state_update = False
    targets: list[Tensor]
    predicted: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("targets", default=[], dist_reduce_fx="cat")
        self.add_state("predicted", default=[], dist_reduce_fx="cat")

    def update(self, target: Tensor, predicted: Tensor) -> None:
        self.targets.append(target.detach())
        self.predicted.append(predicted.detach())

    def compute(self) -> tuple[Tensor, Tensor]:
        """(rows, ...) targets and (rows, names) predictions."""
        if isinstance(self.targets, list) and not self.targets:  # several devices have joined them to tensors
            return torch.empty(0), torch.empty(0)
        return dim_zero_cat(self.targets), dim_zero_cat(self.predicted)

    def rows(self) -> tuple[Tensor, Tensor]:
        """What `compute` says, but a single row stays a row: a Metric makes a scalar of it."""
        with self.sync_context():
            return type(self).compute(self)
