"""Survival in discrete time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from wsi_trainer.models.tasks.survival import SurvivalTask


class HazardTask(SurvivalTask):
    """Discrete-time hazards: one logit for each interval, the probability of the event in it after none before.

    The likelihood of a slide needs no other slide, so it is exact with one slide a step. A slide with an event
    contributes the hazard of its interval and the survival of those before; one without has survived the intervals
    that ended before it was last seen. The last interval has no end. The risk, by which slides are ordered, is minus
    the expected number of intervals survived.
    """

    def __init__(
        self,
        time: str = "time",
        event: str = "event",
        intervals: int = 4,
        ends: Sequence[float] | None = None,
    ) -> None:
        """Build the task.

        Args:
            time: Column of the manifest with the time of the event, or of the last visit without one.
            event: Column with 1 where the event happened, 0 where it was not seen.
            intervals: How many; their ends are quantiles of the training slides' times of events.
            ends: The ends of all intervals but the last, in the unit of `time`, instead of `intervals`.
        """
        super().__init__(time, event)
        if ends is not None and (not ends or list(ends) != sorted(set(ends)) or ends[0] <= 0):
            raise ValueError(f"ends is {list(ends)}; give rising times above 0")
        if ends is None and intervals < 2:
            raise ValueError(f"intervals is {intervals}; a survival curve has at least 2")
        self.outputs = intervals if ends is None else len(ends) + 1
        self.given = ends is not None
        # Until the training slides are known: unit steps, so that a plan and a forward need no data.
        values = torch.arange(1.0, intervals) if ends is None else torch.tensor([float(end) for end in ends])
        self.register_buffer("ends", values.double())
        self.ends: Tensor
        self.names = ("risk", *(f"survival_{index + 1}" for index in range(self.outputs)))

    def prepare(self, targets: Tensor) -> None:
        if self.given:
            return
        times = targets[targets[:, 1] == 1, 0].double()
        shares = torch.arange(1, self.outputs, dtype=torch.float64) / self.outputs
        ends = torch.quantile(times, shares) if len(times) else self.ends.cpu()
        if len(ends.unique()) < len(ends) or ends[0] <= 0:
            raise ValueError(
                f"{len(times)} training slides with an event do not make {self.outputs} intervals; give fewer "
                "(model.task.init_args.intervals) or their ends"
            )
        self.ends.copy_(ends)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        times, events = target[:, 0].to(self.ends), target[:, 1].to(logits.dtype)
        # Interval k is (end of k−1, end of k]: an event at its end lies in it, a visit at its end has survived it.
        interval = torch.searchsorted(self.ends, times, right=False)
        survived = torch.searchsorted(self.ends, times, right=True)
        happened = events[:, None] * functional.one_hot(interval, self.outputs).to(logits.dtype)
        before = torch.where(events > 0, interval, survived)
        through = (torch.arange(self.outputs, device=logits.device) < before[:, None]).to(logits.dtype)
        terms = happened * functional.logsigmoid(logits) + through * functional.logsigmoid(-logits)
        return -terms.sum(dim=1).mean()

    def predict(self, logits: Tensor) -> Tensor:
        """The risk, then the probability to survive each interval."""
        survival = functional.logsigmoid(-logits).cumsum(dim=1).exp()
        return torch.cat([-survival.sum(dim=1, keepdim=True), survival], dim=1)
