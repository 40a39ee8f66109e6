"""A plan is data: it goes to JSON and back, can be edited and used, and a wrong edit is told clearly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, Plan, TiledModule, make_plan
from lightning_plugin.boxes import Grid
from lightning_plugin.errors import BudgetError, PlanError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(True), nn.AdaptiveAvgPool2d(1),
    ).double()  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(network(), (1, 3, 96, 96), budget="500KiB", dtype=torch.float64)


def test_json_both_ways(plan: Plan) -> None:
    assert len(plan.segments) > 1
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_edited_by_hand_gives_the_same_result(plan: Plan) -> None:
    segments = tuple(
        s if s.keep else replace(s, forward=Grid((3, 2)), backward=Grid((2, 5)), tier="disk") for s in plan.segments
    )
    x = torch.randn(1, 3, 96, 96, dtype=torch.float64)
    net, twin = network(), network()
    tiled = TiledModule(twin, plan=Plan.from_json(replace(plan, segments=segments, budget=None).to_json()))
    net(x).sum().backward()
    tiled(x).sum().backward()
    for a, b in zip(net.parameters(), twin.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-9)
    for a, b in zip(net.buffers(), twin.buffers()):
        assert torch.allclose(a, b, rtol=1e-12)


def edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["segments"][0].update(changes)


def reverse(data: dict[str, Any]) -> None:
    data["segments"].reverse()


def drop_last(data: dict[str, Any]) -> None:
    data["segments"].pop()


def double(data: dict[str, Any]) -> None:
    data["segments"].insert(0, data["segments"][0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit(targets=[999]), "names node 999, the network has nodes 0 to"),
        (edit(targets=[]), "makes nothing"),
        (edit(tier="cloud"), "not on 'cloud'"),
        (edit(forward={"counts": [2, 2, 2]}), "has 2 spatial axes"),
        (edit(forward={"counts": [0, 2]}), "at least one tile"),
        (edit(forward=7), "not a plan"),
        (edit(colour="red"), "colour"),
        (reverse, "before any segment has made it|no earlier segment has made"),
        (drop_last, "no segment of the plan makes"),
        (double, "a second time"),
        (lambda data: data.update(shape=[1, 3, 64, 64]), "shape"),
        (lambda data: data.pop("segments"), "not a plan"),
    ],
)
def test_a_bad_edit_is_told(plan: Plan, change: Callable[[dict[str, Any]], None], says: str) -> None:
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(PlanError, match=says):
        TiledModule(network(), plan=Plan.from_json(json.dumps(data)))(torch.randn(1, 3, 96, 96, dtype=torch.float64))


def test_the_table_names_what_matters(plan: Plan) -> None:
    text = str(plan)
    assert "within 500.0 KiB" in text and "without pooling indices" in text
    assert all(s.path in text for s in plan.segments)


def test_the_picture_is_drawn(plan: Plan, tmp_path: Path) -> None:
    plan.draw(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_for_a_loss_on_a_map_says_what_to_do_where_the_map_is_wanted_whole() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)).double()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    of_map = make_plan(module, LazyImage.from_tensor(x), budget="1MiB")
    expected = torch.autograd.grad(module(x).sum(), module[0].weight)[0]
    TiledModule(module, plan=of_map)(LazyImage.from_tensor(x)).sum().backward()
    assert torch.allclose(module[0].weight.grad, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    with pytest.raises(PlanError, match=r"returned as a whole tensor.*give the module a LazyImage .*\.plan"):
        TiledModule(module, plan=of_map)(x)
    whole = TiledModule(module, budget="1MiB")
    module.zero_grad()
    whole(x).sum().backward()
    assert whole.plan is not None
    module.zero_grad()
    TiledModule(module, plan=whole.plan)(x).sum().backward()
    assert torch.allclose(module[0].weight.grad, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.slow
def test_a_plan_for_an_ordinary_tensor_is_that_of_its_call() -> None:
    """A map that the module returns is held whole, so that no budget is planned that the call refuses."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    x = torch.randn(1, 3, 64, 64)
    with pytest.raises(BudgetError) as planned:
        make_plan(module, x, budget=1000)
    with pytest.raises(BudgetError) as called:
        TiledModule(module, budget=1000)(x)
    assert planned.value.smallest == called.value.smallest
    plan, tiled = make_plan(module, x, budget=called.value.smallest), TiledModule(module, budget=called.value.smallest)
    tiled(x).sum().backward()
    assert tiled.plan is not None and tiled.plan.segments == plan.segments
    TiledModule(module, plan=plan)(x).sum().backward()
    for lazy in (LazyImage.from_tensor(x), x.shape):
        with pytest.raises(BudgetError) as of_loss:
            make_plan(module, lazy, budget=1000)
        assert of_loss.value.smallest < 0.8 * planned.value.smallest
