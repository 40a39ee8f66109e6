"""Plans, with how they are read, saved and drawn; their fields are in `plan_fields`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.picture import draw
from lightning_plugin.plan_fields import HALOS, TIERS, BarePlan, SegmentPlan
from lightning_plugin.plan_table import table

__all__ = ["HALOS", "TIERS", "Plan", "SegmentPlan"]


@dataclass(frozen=True)
class Plan(BarePlan):
    """All that is decided before a step, and what it is predicted to cost."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan a JSON text says; a text edited by hand is checked."""
        try:
            data: dict[str, Any] = json.loads(text)
            segments = tuple(_segment(s) for s in data.pop("segments"))
            data["shape"] = tuple(data.get("shape", ()))
            data["barriers"] = tuple(data.get("barriers", ()))
            return Plan(segments, **data)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"this is not a plan: {error}") from error

    def __str__(self) -> str:
        return table(self)

    def draw(self, path: str) -> None:
        """Write a picture: memory over the step by segment against the budget line."""
        draw(self, path)


def _segment(data: dict[str, Any]) -> SegmentPlan:
    known = dict(data)
    for name in ("forward", "backward"):
        known[name] = Grid(*(tuple(known[name].get(k, ())) for k in ("counts", "sides")))
    known["targets"] = tuple(known["targets"])
    return SegmentPlan(**known)
