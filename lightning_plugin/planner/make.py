"""Plans before anything runs: `make_plan`, and the cache of plans that steps share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.boxes import Box
from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.errors import PlanError
from lightning_plugin.options import Chains, Options, Words
from lightning_plugin.plan import Plan
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.planner.choose import choose_plan
from lightning_plugin.planner.lower import lower_tiers
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.optimizers import state_for
from lightning_plugin.planner.policies import policy_of
from lightning_plugin.planner.rates import Rates, rates_of
from lightning_plugin.private import version
from lightning_plugin.rules.split import approximation
from lightning_plugin.splitting import Splitting
from lightning_plugin.trees import tree_leaves

__all__ = ["Blank", "make_plan"]


@dataclass(frozen=True)
class Blank:
    """An image of a given shape that is only planned for and never read."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        raise PlanError("this image has a shape and no pixels: it was made for planning")

    def constant(self, box: Box) -> Tensor | None:
        return None


def make_plan(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: str | None = None,
    **options: Unpack[Words],
) -> Plan:
    """The plan for one training step (or, in ``torch.no_grad``, one evaluation) of ``module`` on an image.

    ``image`` is a shape ``(N, C, *spatial)``, a tensor or a `LazyImage`. Nothing is read and no activation is
    allocated: parameters may even be on the meta device. ``device`` names the device whose rates rank the plans
    (``"cuda:a100"``, ``"cpu"``); it need not be there. Where it is this machine's own and was calibrated (see
    `calibrate`), what was measured counts; without ``device`` it is where the module's parameters are, and for a CPU
    the built-in figures count. What an ``optimizer`` of PyTorch's, by its name, keeps for each parameter is part of the
    plan. The options, of which ``budget`` is one that has to be given, are those of `Options`.
    """
    asked = Options.parse(options)
    if asked.budget is None:
        raise ValueError('a plan is made for a budget, such as budget="2GiB"')
    with recorded(module, image, dtype, asked.splitting, optimizer, asked.chains) as (network, shape):
        policy, device = policy_of(asked.policy, asked.halo), device or accelerator(network)
        plan = choose_plan(network, rates_for(device), asked.budget, lower_tiers(device, asked), policy, asked.calls)
    return dataclasses.replace(plan, shape=shape, approximation=approximation(network.nodes))


@contextmanager
def recorded(
    module: nn.Module,
    image: Sequence[int] | Tensor,
    dtype: torch.dtype,
    splitting: Splitting | None = None,
    optimizer: str | None = None,
    chains: Chains = "never",
) -> Iterator[tuple[Network, tuple[int, ...]]]:
    """What a step of a module on an image runs, split if it is to be, and the image's shape; the recording is gone
    after the block."""
    if isinstance(image, LazyImage):
        lazy = LazyImage(image.source, device=image.device)
    elif isinstance(image, Tensor):
        lazy = LazyImage.from_tensor(image)
    else:
        device = next((p.device for p in module.parameters() if not p.is_meta), None)
        lazy = LazyImage(Blank(tuple(image), dtype), device=device)
    lazy._session.root().splitting, lazy._session.root().chains = splitting, chains
    with unchanged(module):
        try:
            out = module(lazy)
        finally:
            lazy._session.root().abandon()
    leaves = [t for t in tree_leaves(out) if isinstance(t, LazyTensor)]
    if not leaves:
        raise PlanError(f"{type(module).__name__} returned nothing that depends on the image")
    scalars = [scalar(t) for t in leaves]
    recording = lazy._session.root().recorded([t._value for t in scalars])
    owed = {} if optimizer is None else state_for(optimizer, [capture.tensor for capture in recording.captures])
    yield Network(recording, owed=owed), tuple(lazy.shape)


def accelerator(network: Network) -> str | None:
    """The kind of device that a network's image is on, where it is not a CPU."""
    kinds = {image.device.type for image in network.recording.images}
    return next(iter(kinds - {"cpu"}), None)


def rates_for(device: str | None) -> Rates:
    """The rates that rank plans: the built-in table's where no device is named."""
    return rates_of("cpu") if device is None else local_rates(device)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back buffers that a module writes while it is recorded (BatchNorm counts its batches). An update that some
    other recording has still to make is made first."""
    kept = [(b, version(b), b.detach().clone()) for b in module.buffers() if not b.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before, value in kept:
                if version(buffer) != before:
                    buffer.copy_(value)


def scalar(t: LazyTensor) -> LazyTensor:
    """A map's stand-in for the loss that will be computed from it."""
    total: Any = t.sum() if t._value.is_map else t
    return total
