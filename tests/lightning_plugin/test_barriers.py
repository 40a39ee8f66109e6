"""Operators without a rule: run whole and exact where they fit, refused by name where they do not."""

import pytest
import torch
from torch import nn

from lightning_plugin import BarrierError, BudgetError, TiledModule, make_plan
from tests.exactness import assert_exact


class Median(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, dim=3).values * x


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), Median(), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1))


def test_a_barrier_in_the_middle_is_exact() -> None:
    assert_exact(net(), (2, 3, 37, 41))


def test_the_plan_names_barriers() -> None:
    plan = make_plan(net(), (1, 3, 256, 256), budget="64MiB")
    assert plan.barriers == ("sort in '2'",)
    assert "sort in '2'" in str(plan)


def test_a_barrier_that_does_not_fit_is_refused_with_its_name_and_the_way_out() -> None:
    with pytest.raises(BarrierError, match=r"sort in '2' has to run whole.*Give at least") as refused:
        make_plan(net(), (1, 3, 4096, 4096), budget="64MiB")
    assert isinstance(refused.value, BudgetError) and refused.value.operator == "sort in '2'"
    assert refused.value.smallest > 64 * 2**20


def test_execution_refuses_before_anything_runs() -> None:
    tiled = TiledModule(net(), budget="1MiB")
    with pytest.raises(BarrierError):
        tiled(torch.randn(1, 3, 512, 512))
