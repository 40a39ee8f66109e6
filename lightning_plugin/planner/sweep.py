"""Time against budget: plans of one network from the smallest budget that works to what plain PyTorch needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.errors import BudgetError
from lightning_plugin.memory import budget_for
from lightning_plugin.options import Options, Words
from lightning_plugin.plan import Plan
from lightning_plugin.plan_views import draw_sweep, sweep_table
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import Chooser
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.make import accelerator, rates_for
from lightning_plugin.planner.search.policies import AUTO, with_halo
from lightning_plugin.recording import approximation

#: A budget under which every network is left whole.
AMPLE = 1 << 60


@dataclass(frozen=True)
class Sweep:
    """Plans by ascending budget, from the smallest that works to what plain PyTorch needs.

    Where a larger budget only found a slower plan, the smaller budget's plan stands in its place.
    ``plain`` keeps everything, as plain PyTorch does, and its budget is what that needs. ``asked`` is the plan of the
    budget that the user asked for.
    """

    plans: tuple[Plan, ...]
    plain: Plan
    asked: Plan | None = None

    def __str__(self) -> str:
        return sweep_table(self.plans, self.plain, self.asked)

    def draw(self, path: str) -> None:
        """Write a picture: predicted seconds of a step against the budget."""
        draw_sweep(self.plans, self.plain, self.asked, path)


def sweep(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    *,
    count: int = 10,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: str | None = None,
    tell: Callable[[range], Iterable[int]] = iter,
    **options: Unpack[Words],
) -> Sweep:
    """Plan one network under ``count`` budgets, evenly spaced on a logarithmic scale.

    The arguments are those of `make_plan`; ``budget`` is marked among the others. ``tell`` wraps the range of plans to
    be made, so that a progress bar can count them.
    """
    chosen = Options.parse(options)
    with recorded(module, image, dtype, chosen.splitting, optimizer, chosen.chains) as (network, shape):
        policy = with_halo(AUTO, chosen.halo)
        device = device or accelerator(network)
        chooser = Chooser(network, rates_for(device), lower_tiers(device, chosen), policy)
        asked: Plan | None = None
        plans: list[Plan] = []
        between: list[int] = []
        for turn in tell(range(max(2, count))):
            if turn == 0:
                asked = None if chosen.budget is None else chooser.choose(chosen.budget)
                plans.append(smallest(chooser))
            elif turn == 1:
                plans.append(ample(chooser))
                between = spaced(plans[0].budget or 1, plans[1].budget or 1, count)
            elif turn - 2 < len(between):
                plans.append(chooser.choose(between[turn - 2]))
    about = approximation(network.nodes)
    found = [dataclasses.replace(p, shape=shape, approximation=about) for p in never_slower(plans)]
    if asked is not None:
        asked = dataclasses.replace(asked, shape=shape, approximation=about)
    return Sweep(tuple(found), found[-1], asked)


def smallest(chooser: Chooser) -> Plan:
    """The plan of the smallest budget that works."""
    budget = 1
    while True:
        try:
            return chooser.choose(budget)
        except BudgetError as error:  # names the smallest; a barrier names only its own need, so ask again
            budget = max(error.smallest, budget + 1)


def ample(chooser: Chooser) -> Plan:
    """The plan that keeps everything, under the budget that it needs."""
    plan = chooser.choose(AMPLE)
    return dataclasses.replace(plan, budget=budget_for(plan.peak_bytes))


def spaced(low: int, high: int, count: int) -> list[int]:
    """Budgets between two others, which are not among them; none where there is nothing between."""
    if count < 3 or high <= low + count:
        return []
    step = (high / low) ** (1 / (count - 1))
    return [round(low * step**i) for i in range(1, count - 1)]


def never_slower(plans: Sequence[Plan]) -> list[Plan]:
    """Plans by budget, each at least as fast as those of smaller budgets, which fit it too."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda p: p.budget or 0):
        if found and plan.seconds > found[-1].seconds:
            plan = dataclasses.replace(found[-1], budget=plan.budget)
        found.append(plan)
    return found
