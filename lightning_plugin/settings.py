"""What the user said about how to run, and what was planned for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Node
from lightning_plugin.plan import Plan
from lightning_plugin.policy import fixed


@dataclass(eq=False)
class Settings:
    """How the next recordings are to be run.

    ``tiles`` (and ``backward_tiles``) fix one grid for all segments. ``plan`` is the last plan that ran.
    """

    tiles: tuple[int, ...] | None = None
    backward_tiles: tuple[int, ...] | None = None
    plan: Plan | None = field(default=None, init=False)

    def choose(self, nodes: Sequence[Node]) -> Plan:
        forward = Grid(self.tiles) if self.tiles else None
        backward = Grid(self.backward_tiles) if self.backward_tiles else None
        return fixed(nodes, forward, backward)

    def planned(self, plan: Plan) -> None:
        self.plan = plan
