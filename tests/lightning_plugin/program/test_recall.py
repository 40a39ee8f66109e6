"""Stored maps that backward reads back: what is computed, what comes out, what is held and what is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, Plan, TiledModule, make_plan
from lightning_plugin.memory import RESERVE
from lightning_plugin.plan import SegmentPlan
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from tests.exactness import TOLERANCE
from tests.lightning_plugin.outside import account
from tests.lightning_plugin.rules.test_unread import Counting, aten
from tests.lightning_plugin.test_random_networks import QUIET
from tests.zoo.resnet import BasicBlock, ResNet


def normed(channels: int = 8) -> nn.Sequential:
    """Two convolutions, each before a BatchNorm in train mode."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def changed(plan: Plan, change: Callable[[SegmentPlan], SegmentPlan]) -> Plan:
    return replace(plan, segments=tuple(s if s.keep else change(s) for s in plan.segments))


def tiled_plan(net: nn.Module, x: Tensor, **how: Any) -> Plan:
    """A plan of some tiles whose segments recall."""
    tiled = TiledModule(net, tiles=(2, 2))
    tiled(LazyImage(x)).sum().backward()
    assert tiled.plan is not None
    return changed(tiled.plan, lambda s: replace(s, recall=True, **how))


def gradients(module: nn.Module, net: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    total = loss(module(x if module is net else LazyImage(x)))
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(a.abs().max()))


@pytest.mark.parametrize("how", [{}, {"tier": "disk"}, {"tier": "disk", "ahead": True}], ids=str)
def test_what_is_recalled_is_computed_once(how: dict[str, Any]) -> None:
    net, x = normed().double(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    tiled = TiledModule(net, plan=tiled_plan(net, x, **how))
    with Counting() as counting:
        ours = gradients(tiled, net, x, lambda out: out.square().sum())
    assert counting.calls[aten.convolution.default] == 8  # two convolutions, four tiles, forward alone
    same(gradients(net, net, x, lambda out: out.square().sum()), ours)


@pytest.mark.slow
@settings(max_examples=4, **QUIET)
@given(
    grids=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    tier=st.sampled_from(["device", "disk"]),
    ahead=st.booleans(),
    momentum=st.booleans(),
    width=st.sampled_from([1 / 32, 1 / 16]),
)
def test_residual_networks_are_exact(
    grids: tuple[int, int], tier: str, ahead: bool, momentum: bool, width: float
) -> None:
    """Shortcuts read the same maps; a second step, and running statistics."""
    torch.manual_seed(1)
    net = ResNet(BasicBlock, (1, 1, 1, 1), width_mult=width, num_classes=3).double().train()
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    first = TiledModule(net, tiles=grids)
    first(LazyImage(x)).sum().backward()
    assert first.plan is not None
    plan = changed(first.plan, lambda s: replace(s, recall=True, tier=tier, ahead=ahead and tier == "disk"))
    tiled = TiledModule(net, plan=plan)
    for _ in range(2):
        same(
            gradients(net, net, x, lambda out: out.square().sum()),
            gradients(tiled, net, x, lambda out: out.square().sum()),
        )


def test_a_graph_that_is_retained_is_pulled_back_again() -> None:
    net, x = normed().double(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    tiled = TiledModule(net, plan=tiled_plan(net, x))
    found = []
    for module in (net, tiled):
        net.zero_grad(set_to_none=True)
        loss = module(x if module is net else LazyImage(x)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    same(*found)


class Statistic(nn.Module):
    """A loss of statistics alone, and one of a map alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.conv(x)
        return made.var((2, 3)), (made - made.mean((2, 3), keepdim=True)).square().mean()


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_one_of_the_two_may_lead_to_no_loss(which: tuple[int, ...]) -> None:
    net, x = Statistic().double(), torch.randn(1, 3, 32, 32, dtype=torch.float64)

    def loss(out: Any) -> Tensor:
        return sum((out[i].square().sum() for i in which), torch.zeros((), dtype=torch.float64))

    first = TiledModule(net, tiles=(2, 2))
    gradients(first, net, x, loss)
    assert first.plan is not None
    tiled = TiledModule(net, plan=changed(first.plan, lambda s: replace(s, recall=True)))
    same(gradients(net, net, x, loss), gradients(tiled, net, x, loss))


def run(tiled: TiledModule, x: Tensor) -> None:
    tiled(LazyImage(x)).square().sum().backward()


@pytest.mark.parametrize("budget", ["2.3MiB", "3MiB"])
def test_a_plan_recalls_and_knows_what_it_holds(budget: str) -> None:
    net, x = normed(16), torch.randn(1, 3, 128, 128)
    plan = make_plan(net, x, budget=budget, disk=True)
    tiled = TiledModule(net, plan=plan)
    books = account(lambda: run(tiled, x), net)
    assert any(s.recall for s in plan.segments)
    assert plan.peak_bytes - RESERVE <= tiled.peak_bytes <= plan.peak_bytes
    assert books.held <= plan.peak_bytes + RESERVE  # with the loss, which is the user's


@pytest.mark.parametrize("how", [{}, {"tier": "disk"}, {"tier": "disk", "ahead": True}], ids=str)
def test_a_rehearsal_holds_what_a_step_does(how: dict[str, Any]) -> None:
    """On the device, too, where what is recalled is held until it was read back."""
    net, x = normed(16), torch.randn(1, 3, 128, 128)
    plan = changed(make_plan(net, x, budget="4.5MiB", disk=False), lambda s: replace(s, recall=True, **how))
    plan = replace(plan, budget=None)
    with recorded(net, x, torch.float32) as (network, _):
        found = rehearse(plan, network)
    tiled = TiledModule(net, plan=plan)
    books = account(lambda: run(tiled, x), net)
    assert found.peak - RESERVE <= tiled.peak_bytes <= found.peak + RESERVE
    assert books.held <= found.peak + RESERVE
