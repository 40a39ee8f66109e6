"""Losses of networks that share nothing but an image, or a frozen trunk: pulled back in any order, or in part."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, PlanError, TiledModule
from tests.exactness import TOLERANCE, asked, difference
from tests.sampling import sampled

SETTINGS = [
    {"tiles": (2, 3)},
    {"tiles": (3, 1), "halo": "share"},
    {"budget": 90 << 10},
]


class Heads(nn.Module):
    """Two heads and a trunk, frozen or not; the heads' own trunks where there is none."""

    def __init__(self, trunk: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh()) if trunk else nn.Identity()
        width = 6 if trunk else 3
        self.one = nn.Sequential(nn.Conv2d(width, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.other = nn.Sequential(nn.Conv2d(width, 5, 5, stride=2), nn.Sigmoid())

    def forward(self, x):
        x = self.trunk(x)
        return self.one(x).mean((2, 3)).square().sum(), self.other(x).amax((2, 3)).sum()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def compared(net, pull, settings, frozen=False):
    """The gradients of a way to pull back, plain and tiled."""
    torch.manual_seed(0)
    net = net.double()
    if frozen:
        net.trunk.requires_grad_(False)
    twin = copy.deepcopy(net)
    x = torch.randn(2, 3, 30, 34, dtype=torch.float64)
    pull(net, *net(x))
    pull(twin, *twin(LazyImage.from_tensor(x, engine=asked(**settings))))
    expected, actual = gradients(net), gradients(twin)
    assert expected.keys() == actual.keys() and expected
    floor = 1e-3 * max(float(e.abs().max()) for e in expected.values())
    errors = {name: difference(actual[name], e, floor) for name, e in expected.items()}
    assert max(errors.values()) < TOLERANCE, errors


def first_then_second(net, one, other):
    one.backward()
    other.backward()


def second_then_first(net, one, other):
    other.backward()
    one.backward()


def only_one(net, one, other):
    other.backward()


def head_alone_first(net, one, other):
    """Gradients of one head's parameters are asked for, then those of all."""
    torch.autograd.grad(one, list(net.one.parameters()), retain_graph=True)
    (one + other).backward()


def twice(net, one, other):
    (one * other).backward(retain_graph=True)
    (one + other).backward()


@pytest.mark.parametrize(
    ("pull", "settings"),
    sampled([first_then_second, second_then_first, only_one], SETTINGS, every=3),
)
def test_heads_that_share_only_the_image(pull, settings):
    compared(Heads(trunk=False), pull, settings)


@pytest.mark.parametrize(
    ("pull", "settings"),
    sampled([first_then_second, second_then_first, only_one], SETTINGS, every=3),
)
def test_heads_on_a_frozen_trunk(pull, settings):
    compared(Heads(trunk=True), pull, settings, frozen=True)


@pytest.mark.parametrize(
    ("pull", "settings"),
    sampled([only_one, head_alone_first, twice], SETTINGS, every=3),
)
def test_a_pass_leaves_nothing_to_the_next(pull, settings):
    compared(Heads(trunk=True), pull, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_pass_that_failed_leaves_nothing_to_the_next(settings):
    """A hook raises in the middle of backward; the second try gives what one alone would have given."""
    state = {"fails": True}

    def fail(gradient):
        if state.pop("fails", False):
            raise OSError("stopped")

    def pull(net, one, other):
        state["fails"] = True
        handle = net.trunk[0].bias.register_hook(fail)
        with pytest.raises(OSError, match="stopped"):
            (one + other).backward(retain_graph=True)
        net.zero_grad(set_to_none=True)
        (one + other).backward()
        handle.remove()

    compared(Heads(trunk=True), pull, settings)


class Turned(Heads):
    """A head that needs the last rows first, beside one whose first tile needs all rows, so that both together are in
    order; on a trunk that is frozen they are two parts, and the first by itself is not."""

    def __init__(self) -> None:
        super().__init__(trunk=True)
        self.other = nn.Sequential(nn.Conv2d(6, 2, 69, padding=34), nn.Sigmoid())

    def forward(self, x):
        x = self.trunk(x)
        return self.one(x.flip(2)).mean((2, 3)).square().sum(), self.other(x).amax((2, 3)).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [pytest.param(SETTINGS[0], marks=pytest.mark.full), SETTINGS[1], {"budget": 3 << 20}], ids=str
)
def test_a_part_that_cannot_be_a_scan_by_itself_is_none(settings):
    compared(Turned(), first_then_second, settings, frozen=True)


def test_a_plan_of_a_scan_that_a_part_cannot_be_is_refused():
    net = Turned()
    net.trunk.requires_grad_(False)
    tiled = TiledModule(net, tiles=(3, 1), halo="recompute")
    tiled(torch.randn(1, 3, 30, 34))
    assert tiled.plan is not None
    together = max(range(len(tiled.plan.segments)), key=lambda i: len(tiled.plan.segments[i].targets))
    shared = [replace(s, halo="share") if i == together else s for i, s in enumerate(tiled.plan.segments)]
    with pytest.raises(PlanError, match=r"segment \d+ of the plan .* cannot hand rows on: tanh in 'trunk.1' needs "):
        TiledModule(net, plan=replace(tiled.plan, segments=tuple(shared)))(torch.randn(1, 3, 30, 34))
