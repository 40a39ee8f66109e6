"""A plan: which maps are stored, in which segments the network runs, and on which tile grids.

A plan names values by the serial place of their node among the nodes of a run, so that it fits every run of the same
network at the same shapes. It is data: the executor holds no policy, and whatever a plan says, the result is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from lightning_plugin.boxes import Grid


@dataclass(frozen=True)
class SegmentPlan:
    """One segment: the nodes whose results it makes (reduce nodes and stored maps), and its grids."""

    targets: tuple[int, ...]
    forward: Grid
    backward: Grid


@dataclass(frozen=True)
class Plan:
    segments: tuple[SegmentPlan, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        return Plan(
            tuple(
                SegmentPlan(
                    tuple(s["targets"]),
                    Grid(tuple(s["forward"]["counts"])),
                    Grid(tuple(s["backward"]["counts"])),
                )
                for s in data["segments"]
            )
        )
