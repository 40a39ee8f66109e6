"""Plans before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.options import Options, Words
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.calibration.calibrate import local_rates
from lightning_plugin.planner.choose import choose_plan
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.costs.rates import Rates, rates_of
from lightning_plugin.planner.search.policies import AUTO, Policy, with_halo
from lightning_plugin.recording import approximation


def make_plan(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: str | None = None,
    policy: Policy = AUTO,
    **options: Unpack[Words],
) -> Plan:
    """The plan for one training step (or, in ``torch.no_grad``, one evaluation) of ``module`` on an image.

    ``image`` is a shape ``(N, C, *spatial)``, a tensor or a `LazyImage`. Nothing is read and no activation is
    allocated: parameters may even be on the meta device. ``device`` names the device whose rates rank the plans
    (``"cuda:a100"``, ``"cpu"``); it need not be there. Where it is this machine's own and was calibrated (see
    `calibrate`), what was measured counts; without ``device`` it is where the module's parameters are, and for a
    CPU the built-in figures count. What an ``optimizer`` of PyTorch's, by its name, keeps for each parameter is
    part of the plan. A ``policy`` restricts the search, for comparison. The options, of which ``budget`` is one
    that has to be given, are those of `Options`.
    """
    asked = Options.parse(options)
    if asked.budget is None:
        raise ValueError('a plan is made for a budget, such as budget="2GiB"')
    with recorded(module, image, dtype, asked.splitting, optimizer, asked.chains) as (network, shape):
        policy, device = with_halo(policy, asked.halo), device or accelerator(network)
        plan = choose_plan(network, rates_for(device), asked.budget, lower_tiers(device, asked), policy, asked.calls)
    return dataclasses.replace(plan, shape=shape, approximation=approximation(network.nodes))


def accelerator(network: Network) -> str | None:
    """The kind of device that a network's image is on, where it is not a CPU."""
    kinds = {image.device.type for image in network.recording.images}
    return next(iter(kinds - {"cpu"}), None)


def rates_for(device: str | None) -> Rates:
    """The rates that rank plans: the built-in table's where no device is named."""
    return rates_of("cpu") if device is None else local_rates(device)
