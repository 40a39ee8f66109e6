"""What the user said about how to run, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_plugin.boxes import Grid
from lightning_plugin.execute.team import Team
from lightning_plugin.execute.validate import validate
from lightning_plugin.graph import Node
from lightning_plugin.ledger import Ledger
from lightning_plugin.plan import Plan
from lightning_plugin.planner.rates import Rates
from lightning_plugin.policy import fixed
from lightning_plugin.rules.base import Barrier, Captured, Source
from lightning_plugin.source import TensorSource


@dataclass(eq=False)
class Settings:
    """How the next recordings are to be run.

    ``tiles`` (and ``backward_tiles``) fix one grid for all segments; ``budget``, in bytes, leaves it to the planner.
    ``halo`` is "recompute" or "share" for all segments, or "auto": what is faster for each. ``half`` allows maps on
    lower tiers to be kept as bfloat16, which loses digits. ``policy`` restricts the planner (`planner.policies`).
    ``accumulates``: plan for steps that begin with gradients, also where there are none yet, so that one plan does for
    all steps of a training. ``team`` are the ranks that share an image's tiles, where there are several.
    ``rates`` are the device's, found when they are first needed and then kept, so that a run's plans do not depend on
    when it was calibrated. ``plan`` is the last plan that ran, ``ledger`` what its step used where a budget is kept.
    """

    tiles: tuple[int, ...] | None = None
    backward_tiles: tuple[int, ...] | None = None
    budget: int | None = None
    host_budget: int | None = None
    disk: bool = True
    device: str | None = None
    given: Plan | None = None
    halo: str = "auto"
    half: bool = False
    policy: str = "auto"
    accumulates: bool = False
    team: Team | None = None
    rates: Rates | None = field(default=None, init=False)
    plan: Plan | None = field(default=None, init=False)
    ledger: Ledger | None = field(default=None, init=False)
    barriers: tuple[str, ...] = field(default=(), init=False)
    _plans: dict[Any, Plan] = field(default_factory=dict, init=False)

    def choose(self, nodes: Sequence[Node]) -> Plan:
        if self.given is not None:
            validate(self.given, nodes)
            return self.given
        if self.budget is None:
            forward = Grid(self.tiles) if self.tiles else None
            backward = Grid(self.backward_tiles) if self.backward_tiles else None
            return fixed(nodes, forward, backward, halo=self.halo)
        from lightning_plugin.planner.describe import signature

        key = signature(nodes, gradients=not self.accumulates)
        if key not in self._plans:
            self._plans[key] = self.search(nodes, self.budget)
        return self._plans[key]

    def search(self, nodes: Sequence[Node], budget: int) -> Plan:
        """A plan within a budget."""
        from lightning_plugin.planner.calibrate import local_rates
        from lightning_plugin.planner.choose import choose_plan
        from lightning_plugin.planner.lower import Lower
        from lightning_plugin.planner.network import Network
        from lightning_plugin.planner.policies import policy_of

        images = [n.outputs[0] for n in nodes if isinstance(n.op, Source)]
        device = self.device or (images[0].device.type if images else "cpu")
        lower = Lower(None if device.split(":")[0] == "cpu" else self.host_budget or 64 * 2**30, self.disk, self.half)
        self.rates = self.rates or local_rates(device)
        policy = policy_of(self.policy, self.halo)
        plan = choose_plan(Network(tuple(nodes), self.accumulates), self.rates, budget, lower, policy)
        return replace(plan, shape=tuple(images[0].shape) if images else ())

    def begin(self, plan: Plan, nodes: Sequence[Node]) -> Ledger:
        """Note what is about to run, and open the step's page of the ledger."""
        self.plan = plan
        self.barriers = tuple(n.label for n in nodes if isinstance(n.op, Barrier))
        images = [n.op for n in nodes if isinstance(n.op, Source)]
        device = images[0].device if images else torch.device("cpu")
        if self.ledger is None or self.ledger.device != device:
            self.ledger = Ledger(device)
        self.ledger.begin()
        for image in images:
            if isinstance(image.image, TensorSource):
                self.ledger.ignore(image.image.tensor)
        for n in nodes:
            if isinstance(n.op, Captured):
                self.ledger.hold(n.op.tensor)
        return self.ledger
