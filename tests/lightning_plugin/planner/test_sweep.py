"""Time against budget: more memory is never slower, and every point keeps its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from lightning_plugin import BudgetError, Plan, Sweep, make_plan, sweep
from lightning_plugin.plan import Forecast
from lightning_plugin.planner.make import never_slower, spaced

SHAPE = (1, 3, 256, 256)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep(network(), SHAPE, budget="4MiB", count=5, tell=list)


def test_the_ends_are_the_smallest_budget_and_plain_pytorch(swept: Sweep) -> None:
    with pytest.raises(BudgetError) as refused:
        make_plan(network(), SHAPE, budget=1)
    assert swept.plans[0].budget == pytest.approx(refused.value.smallest, rel=0.02)
    assert swept.plain is swept.plans[-1]
    assert all(s.keep for s in swept.plain.segments) and swept.plain.peak_bytes > swept.plain.plain_bytes


def test_budgets_rise_are_kept_and_buy_time(swept: Sweep) -> None:
    budgets = [p.budget or 0 for p in swept.plans]
    seconds = [p.seconds for p in swept.plans]
    assert len(budgets) == 5 and budgets == sorted(set(budgets))
    assert all(p.peak_bytes <= (p.budget or 0) for p in swept.plans)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_the_budget_asked_for_is_planned_as_ever(swept: Sweep) -> None:
    assert swept.asked is not None
    assert swept.asked.to_json() == make_plan(network(), SHAPE, budget="4MiB").to_json()


def test_a_slower_plan_gives_way_to_that_of_a_smaller_budget() -> None:
    fast, slow = (Plan((), budget=10 * i, forecast=Forecast(seconds=float(i))) for i in (1, 2))
    found = never_slower([slow, fast])
    assert found == [fast, replace(fast, budget=20)] and [p.seconds for p in found] == [1.0, 1.0]


@pytest.mark.parametrize(("low", "high", "count", "expected"), [(1, 16, 5, [2, 4, 8]), (10, 12, 5, []), (1, 99, 2, [])])
def test_budgets_are_spaced_evenly_by_ratio(low: int, high: int, count: int, expected: list[int]) -> None:
    assert spaced(low, high, count) == expected


def test_the_table_and_the_picture(swept: Sweep, tmp_path: Path) -> None:
    lines = str(swept).splitlines()
    assert (
        len(lines) == 3 + len(swept.plans) + 2
    )  # a head, headings and their rule; the budget asked for; what times are
    assert "work on the host, which is most of a short step, is not in them" in lines[-1]
    assert [line.split()[-2:] for line in (lines[3], lines[-2])] == [["the", "smallest"], ["plain", "PyTorch"]]
    swept.draw(str(tmp_path / "sweep.png"))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
