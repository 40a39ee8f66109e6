"""Plans, with how they are read, saved and drawn; their fields are in `plan_fields`, predictions in `plan_forecast`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_plugin import plan_json
from lightning_plugin.picture import draw
from lightning_plugin.plan_fields import HALOS, TIERS, BarePlan, Forecasts, SegmentPlan
from lightning_plugin.plan_forecast import Forecast, SegmentForecast
from lightning_plugin.plan_table import table

__all__ = ["HALOS", "TIERS", "Forecast", "Forecasts", "Plan", "SegmentForecast", "SegmentPlan"]


@dataclass(frozen=True)
class Plan(BarePlan):
    """All that is decided before a step, and what it is predicted to cost."""

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step on the device."""
        return self.forecast.peak_bytes

    @property
    def plain_bytes(self) -> int:
        """What plain PyTorch would hold for backward."""
        return self.forecast.plain_bytes

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.forecast.seconds

    @property
    def recompute(self) -> float:
        """The share of the forward work that is predicted to be done again."""
        return self.forecast.recompute

    def to_json(self) -> str:
        return plan_json.written(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that a JSON text says, also one of a former version; a text edited by hand is checked."""
        return plan_json.read(text, Plan)

    def __str__(self) -> str:
        return table(self)

    def draw(self, path: str) -> None:
        """Write a picture: memory over the step by segment against the budget line."""
        draw(self, path)
