"""Transfers beside the kernels wait for what they need and for nothing that is not done: no GPU is needed to see it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import Plan, TiledModule, make_plan
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import TileNumbers
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.streams import MAIN, SIDE, Recorder, recorded_device

SHAPE = (1, 3, 64, 64)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).double()


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of a device whose maps go to the host, by turns ahead and at once."""
    found = make_plan(network(), torch.empty(SHAPE, dtype=torch.float64), budget="500KiB", device="cuda:a100")
    segments = tuple(replace(s, ahead=not (s.keep or i % 2)) for i, s in enumerate(found.segments))
    assert {(s.tier, s.ahead) for s in segments} >= {("host", True), ("host", False)}, found
    return replace(found, segments=segments, budget=None)  # here the host's memory is the device's too


def step(monkeypatch: Any, plan: Plan, deaf: str = "", tissue: int = SHAPE[2]) -> Recorder:
    """A whole step on a recorded device; its gradients are plain PyTorch's."""
    plain = network()
    net, x = copy.deepcopy(plain), torch.randn(SHAPE, dtype=torch.float64)
    x[..., tissue:, :] = 0.7
    plain(x).square().sum().backward()
    tiled = TiledModule(net, plan=plan)
    with recorded_device(monkeypatch, deaf) as recorder:
        tiled(x).square().sum().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(plain.parameters(), net.parameters(), strict=True)]
    floor = 1e-3 * max(float(e.abs().max()) for e, _ in gradients if e is not None)
    for expected, found in gradients:
        assert expected is not None and found is not None
        assert difference(found, expected, floor) < TOLERANCE
    return recorder


def test_a_whole_step_has_no_race(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    recorder = step(monkeypatch, plan)
    assert not recorder.races()
    assert {a.stream for a in recorder.accesses} == {MAIN, SIDE}
    assert recorder.waits


def test_a_step_on_background_has_no_race(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Tiles for which others stand are not sent, and come from where those lie."""
    found: list[bool] = []
    before = TileNumbers.parts

    def parts(self: TileNumbers, box: Box) -> list[tuple[Box, Box]]:
        here = list(before(self, box))
        found.append(any(part != there for part, there in here))
        return here

    monkeypatch.setattr(TileNumbers, "parts", parts)
    small = [(s, Grid((8, 1))) for s in plan.segments if not s.keep]
    alike = [
        replace(s, forward=g, backward=g, alike=True, tier="host", ahead=i % 2 == 0) for i, (s, g) in enumerate(small)
    ]
    kept = [s for s in plan.segments if s.keep]
    assert not step(monkeypatch, replace(plan, segments=(*alike, *kept)), tissue=8).races()
    assert any(found)


@pytest.mark.parametrize("deaf", ["side stream", "main stream", "host"])
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, plan: Plan, deaf: str) -> None:
    assert step(monkeypatch, plan, deaf).races(), "a wait was left out, and no race was found"
