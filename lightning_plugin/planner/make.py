"""Plans of a module before anything runs: for one budget, and for budgets from the smallest to plain PyTorch's need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.capture.lazy import LazyImage
from lightning_plugin.errors import BudgetError
from lightning_plugin.graph import approximation
from lightning_plugin.memory import budget_for
from lightning_plugin.options import ModuleOptions, Options
from lightning_plugin.plan import Plan
from lightning_plugin.plan_views import draw_sweep, sweep_table
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.planner.choose import Chooser, choose_plan
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.costs.rates import Rates, rates_of
from lightning_plugin.planner.search.policies import AUTO, Policy, with_halo


def make_plan(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: str | None = None,
    policy: Policy = AUTO,
    **options: Unpack[ModuleOptions],
) -> Plan:
    """The plan for one training step (or, in ``torch.no_grad``, one evaluation) of ``module`` on an image.

    Nothing is read and no activation is allocated: parameters may even be on the meta device.

    Args:
        module: Any module.
        image: An ordinary tensor, as it is given to a `TiledModule`, which returns maps whole; a `LazyImage` or a shape
            ``(N, C, *spatial)``, from whose lazy maps the loss is computed tile by tile.
        device: The device whose rates rank the plans (``"cuda:a100"``, ``"cpu"``); it need not be there. For a device
            of this machine that was calibrated (see `calibrate`) the measured rates count. By default it is the device
            of the module's parameters, and for a CPU the built-in rates count.
        dtype: The image's, if only its shape is given.
        optimizer: An optimizer of PyTorch's by its name, whose state for each parameter is part of the plan.
        policy: Restricts the search, for comparison.
        options: Those of `lightning_plugin.options.ModuleOptions`; ``budget`` has to be given.
    """
    asked = Options.parse(options)
    if asked.budget is None:
        raise ValueError('a plan is made for a budget, such as budget="2GiB"')
    with recorded(module, image, dtype, asked.splitting, optimizer, asked.chains, returns_maps(image)) as (
        network,
        shape,
    ):
        policy, device = with_halo(policy, asked.halo), device or accelerator(network)
        plan = choose_plan(network, rates_for(device), asked.budget, lower_tiers(device, asked), policy, asked.calls)
    return dataclasses.replace(plan, shape=shape, approximation=approximation(network.nodes))


def returns_maps(image: Sequence[int] | Tensor) -> bool:
    """True for an ordinary tensor: a `TiledModule` that is given one returns ordinary tensors."""
    return isinstance(image, Tensor) and not isinstance(image, LazyImage)


def accelerator(network: Network) -> str | None:
    """The kind of device that a network's image is on, unless it is a CPU."""
    kinds = {image.device.type for image in network.recording.images}
    return next(iter(kinds - {"cpu"}), None)


def rates_for(device: str | None) -> Rates:
    """The rates that rank plans: those of the built-in table if no device is named."""
    return rates_of("cpu") if device is None else local_rates(device)


#: A budget under which every network is left whole.
AMPLE = 1 << 60


@dataclass(frozen=True)
class Sweep:
    """Plans by ascending budget, from the smallest that works to the need of plain PyTorch.

    If a larger budget only found a slower plan, the smaller budget's plan stands in its place.

    Attributes:
        plans: The plans.
        plain: Keeps everything, as plain PyTorch does, under the budget that this needs.
        asked: The plan of the budget that the user asked for.
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
    **options: Unpack[ModuleOptions],
) -> Sweep:
    """Plan one network under ``count`` budgets, evenly spaced on a logarithmic scale.

    The arguments are those of `make_plan`; ``budget`` is marked among the others. ``tell`` wraps the range of plans to
    be made, so that a progress bar can count them.
    """
    chosen = Options.parse(options)
    with recorded(module, image, dtype, chosen.splitting, optimizer, chosen.chains, returns_maps(image)) as (
        network,
        shape,
    ):
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
    """Budgets between two others, which are not among them; none if there is nothing between."""
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
