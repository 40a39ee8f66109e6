"""Policies restrict the planner to what was published; halos and half precision are choices of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.published import POLICIES, sft
from lightning_plugin import BudgetError, Plan, PlanError, TiledModule, make_plan
from tests.exactness import TOLERANCE, compare
from tests.sampling import sampled

SHAPE = (1, 3, 160, 150)


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 8, 12, 12):
        layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        if width == 8 and channels == 8:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).double()


def plan_of(policy: str, budget: str = "3MiB", **how: Any) -> Plan:
    return make_plan(net(), SHAPE, budget=budget, policy=POLICIES[policy], dtype=torch.float64, **how)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "auto"])
def test_auto_is_never_slower(policy: str) -> None:
    best = plan_of("auto")
    try:
        other = plan_of(policy)
    except BudgetError:
        return
    assert best.seconds <= 1.02 * other.seconds  # a plan within two percent of what was hoped for ends the search


def test_policies_keep_to_what_they_allow() -> None:
    fused = plan_of("fused-stages")
    assert len(fused.segments) == 1
    assert len({s.forward for s in fused.segments} | {s.backward for s in fused.segments}) == 1
    assert not any(s.keep or s.tier != "device" for s in fused.segments)
    for name in ("overl", "overl-h", "2ps", "2ps-h"):
        rows = plan_of(name)
        assert all(set(s.forward.counts[1:]) == {1} and not s.keep for s in rows.segments)
        shared = [s.halo == "share" for s in rows.segments if s.forward.tiles > 1]
        assert shared and all(x == name.startswith("2ps") for x in shared)
    assert len(plan_of("overl").segments) == 1
    whole = plan_of("checkpoint_sequential", budget="12MiB")
    assert all(s.forward.tiles == s.backward.tiles == 1 for s in whole.segments)


@pytest.mark.parametrize(("policy", "norm"), sampled([*POLICIES, "sft"], [False, True], every=2))
def test_every_policy_is_exact_and_keeps_its_budget(policy: str, norm: bool) -> None:
    plain = net(norm)
    other = copy.deepcopy(plain)
    x = torch.randn(SHAPE, dtype=torch.float64)
    budget = {"checkpoint_sequential": 16, "sft": 6}.get(policy, 8) * 2**20
    if policy == "sft":
        plan = sft(other, SHAPE, budget, dtype=torch.float64)
        assert any(s.forward.tiles > 1 for s in plan.segments)
    else:
        plan = make_plan(other, SHAPE, budget=budget, policy=POLICIES[policy], dtype=torch.float64)
    tiled = TiledModule(other, plan=plan)
    expected, actual = plain(x), tiled(x)
    expected.square().sum().backward()
    actual.square().sum().backward()
    found = compare(plain, other, [actual], [expected], (None, None))
    assert max(found.values()) < TOLERANCE
    assert tiled.peak_bytes <= budget


def test_an_unknown_halo_is_told() -> None:
    with pytest.raises(ValueError, match="halo is"):
        plan_of("auto", halo="both")


def test_halos_are_shared_where_the_user_says_so() -> None:
    sharing = plan_of("auto", budget="2MiB", halo="share")
    assert any(s.halo == "share" for s in sharing.segments)
    assert not any(s.halo == "share" for s in plan_of("auto", budget="2MiB", halo="recompute").segments)
    again = Plan.from_json(sharing.to_json())
    assert again == sharing and again.to_json() == sharing.to_json()


def test_what_turns_an_axis_round_cannot_share() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x.relu().flip(2)).mean((2, 3))

    turned = Turned().double()
    plan = make_plan(turned, (1, 3, 40, 40), budget="60KiB", dtype=torch.float64, policy=POLICIES["overl"])
    segments = tuple(replace(s, backward=s.forward, halo="share") for s in plan.segments)
    tiled = TiledModule(turned, plan=replace(plan, segments=segments))
    with pytest.raises(PlanError, match=r'cannot share halos; use halo="recompute"'):
        tiled(torch.randn(1, 3, 40, 40, dtype=torch.float64))


@pytest.mark.slow
def test_half_precision_loses_digits_only_where_it_was_asked_for() -> None:
    """Maps on the disk take half the room, or a quarter; what is computed from them is a little off, and no more."""
    plain = net()
    x = torch.randn(SHAPE, dtype=torch.float64)
    results = []
    for half in (False, True):
        other = copy.deepcopy(plain)
        tiled = TiledModule(other, budget="900KiB", half=half)
        tiled(x).square().sum().backward()
        assert tiled.plan is not None
        assert any(s.tier == "disk" for s in tiled.plan.segments)
        assert any(s.half for s in tiled.plan.segments) == half
        results.append([p.grad for p in other.parameters()])
    exact, near = results
    error = sum((a - b).norm() for a, b in zip(exact, near, strict=True)) / sum(a.norm() for a in exact)
    assert 1e-8 < error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{"budget": "6MiB", "disk": False}, {"tiles": 3}], ids=["budget", "tiles"])
def test_maps_on_the_device_in_half_precision(ways: dict[str, Any]) -> None:
    """Stored maps of float64 take a quarter of their room on the device. A training goes on as near to the exact one,
    also from the step on in which passes are replayed; what was planned is what is held."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    gradients = []
    for half in (False, "device"):
        other = net(norm=True)
        tiled = TiledModule(other, **ways, half=half)
        for _ in range(5):
            other.zero_grad()
            tiled(x).square().sum().backward()
        assert tiled.plan is not None
        segments = [s for s in tiled.plan.segments if not s.keep]
        assert segments and all(s.tier == "device" and s.half == bool(half) for s in segments)
        if "budget" in ways:
            assert 0.9 * tiled.plan.peak_bytes <= tiled.peak_bytes <= tiled.plan.peak_bytes
        gradients.append(torch.cat([p.grad.flatten() for p in other.parameters() if p.grad is not None]))
    exact, near = gradients
    rounding = torch.finfo(torch.bfloat16).eps
    assert 1e-8 < (exact - near).norm() / exact.norm() < 2 * 4 * rounding  # four layers, forward and backward


def test_half_precision_on_the_device_makes_room() -> None:
    """The smallest budget that works is smaller; gradients of maps stay in the type that they are summed in."""

    def smallest(half: Any) -> int:
        with pytest.raises(BudgetError) as refused:
            make_plan(net(norm=True), SHAPE, budget="1KiB", dtype=torch.float64, disk=False, half=half)
        return refused.value.smallest

    assert smallest("device") < 0.8 * smallest(False)
    with pytest.raises(ValueError, match="half='bfloat16': give False, True or 'device'"):
        make_plan(net(), SHAPE, budget="1MiB", half="bfloat16")
