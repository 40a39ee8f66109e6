"""Plans in the JSON of version 1, written key by key: decisions and figures side by side, and no version."""

from __future__ import annotations

import json
from typing import Any

from lightning_plugin import Grid, Plan
from lightning_plugin.plan import SegmentPlan

SEGMENT_FIGURES = (
    "stored_bytes", "forward_bytes", "backward_bytes", "backward_needs", "retained_needs", "seconds", "recompute",
)  # fmt: skip
FIGURES = (
    "peak_bytes", "plain_bytes", "index_bytes", "seconds", "recompute", "fixed_bytes", "reserve_bytes", "held_bytes",
)  # fmt: skip


def version_1(plan: Plan) -> str:
    return json.dumps(
        {
            "segments": [segment(s) for s in plan.segments],
            "budget": plan.budget,
            "shape": list(plan.shape),
            "barriers": list(plan.barriers),
            **{name: getattr(plan.forecast, name) for name in FIGURES},
        }
    )


def segment(s: SegmentPlan) -> dict[str, Any]:
    return {
        "targets": list(s.targets),
        "forward": grid(s.forward),
        "backward": grid(s.backward),
        **{name: getattr(s, name) for name in ("keep", "tier", "path", "halo", "half", "ahead", "drop")},
        **{name: getattr(s.forecast, name) for name in SEGMENT_FIGURES},
    }


def grid(g: Grid) -> dict[str, Any]:
    return {"counts": list(g.counts), "sides": list(g.sides)}
