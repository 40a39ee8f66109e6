"""Survival: the time to an event, which for some slides is only known to be later than some time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import RISK_SCORES, RiskPredictions
from wsi_trainer.models.tasks.base import Cells, Owners, Task, number, yes_or_no


class SurvivalTask(Task):
    """What both survival tasks share: the columns of time and event, and a risk as prediction."""

    scores = RISK_SCORES
    names: tuple[str, ...] = ("risk",)

    def __init__(self, time: str, event: str) -> None:
        super().__init__()
        self.columns = (time, event)

    def target(self, cells: Cells) -> Tensor:
        """(1, 2): time and event."""
        time, event = self.columns
        months = number(cells, time)
        if months < 0:
            raise UserError(f"has {time} {cells[time]!r}; a time cannot be negative")
        return torch.tensor([[months, float(yes_or_no(cells, event))]])

    def lack(self, targets: Tensor) -> str | None:
        return None if targets[:, 1].any() else "no slide with an event"

    def stratum(self, cells: Cells) -> str:
        return f"event {yes_or_no(cells, self.columns[1]):d}"

    def predictions(
        self, owners: Owners, targets: NDArray[np.float64], predicted: NDArray[np.float64]
    ) -> RiskPredictions:
        times, events = targets[:, 0], targets[:, 1].astype(bool)
        return RiskPredictions(owners.slides, owners.patients, times, events, predicted[:, 0], owners.sites)


class CoxTask(SurvivalTask):
    """Cox's proportional hazards, a slide at a time: the logit is the logarithm of the relative risk.

    The partial likelihood compares the risks of all slides, and a step sees one. So the risks of the last `memory`
    training slides are remembered as numbers, and the loss of a slide is the negative log partial likelihood of the
    slides remembered and this one, divided by their events. Its gradient is with respect to this slide's risk alone;
    the others are constants, computed by the weights of their own step. It is what a batch would give only as far as
    the weights have not moved since, and a slide does not hear of those after it until it comes again. `HazardTask`
    needs no other slide and is exact for every batch size; take Cox where proportional hazards are the question.
    """

    outputs = 1

    def __init__(self, time: str = "time", event: str = "event", memory: int = 64) -> None:
        """Build the task.

        Args:
            time: Column of the manifest with the time of the event, or of the last visit without one.
            event: Column with 1 where the event happened, 0 where it was not seen.
            memory: Training slides whose risks are remembered; about as many as are accumulated for a step or more.
        """
        super().__init__(time, event)
        if memory < 1:
            raise ValueError(f"memory is {memory}; a risk is compared with at least 1 other slide's")
        self.register_buffer("remembered", torch.zeros(memory, 3))  # risk, time, event
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self.remembered: Tensor
        self.filled: Tensor

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        past = self.remembered[: int(self.filled)].clone()  # the memory moves on before backward
        risks = torch.cat([logits[:, 0], past[:, 0].to(logits)])
        times = torch.cat([target[:, 0].to(logits), past[:, 1].to(logits)])
        events = torch.cat([target[:, 1].to(logits), past[:, 2].to(logits)])
        if self.training:
            self._remember(logits, target)
        return partial_likelihood(risks, times, events)

    @torch.no_grad()
    def _remember(self, logits: Tensor, target: Tensor) -> None:
        newest = torch.cat([logits.detach(), target.to(logits)], dim=1).to(self.remembered)
        size = len(self.remembered)
        self.remembered.copy_(torch.cat([newest, self.remembered])[:size])
        self.filled.add_(len(newest)).clamp_(max=size)

    def predict(self, logits: Tensor) -> Tensor:
        return logits


def partial_likelihood(risks: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """The negative log partial likelihood for each event, ties by Breslow; 0 where no event happened."""
    at_risk = times[None, :] >= times[:, None]  # of row i: who was still there when it happened
    totals = torch.where(at_risk, risks[None, :], float("-inf")).logsumexp(dim=1)
    return ((totals - risks) * events).sum() / events.sum().clamp(min=1)
