"""Figures of the SFT paper: float32, batch 1, 10240², ReLU in place."""

from __future__ import annotations

import pytest

from lightning_plugin import make_plan
from tests.zoo import ZOO

GIB = 2**30


@pytest.mark.parametrize(("name", "paper"), [("vgg16", 118), pytest.param("vgg19", 129, marks=pytest.mark.full)])
def test_what_plain_pytorch_holds(name: str, paper: float) -> None:
    shape, few = (1, 3, 10240, 10240), {"halo": "recompute"}  # any plan says it: here are fewer to look at
    plan = make_plan(ZOO[name].full(), shape, budget="11GiB", device="cuda:a100", **few)
    assert (plan.plain_bytes - plan.forecast.index_bytes) / GIB == pytest.approx(paper, rel=0.02)
    if name == "vgg16":
        assert plan.plain_bytes / GIB == pytest.approx(142, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"),
    [
        pytest.param("vgg16", 20480, marks=pytest.mark.full),
        pytest.param("vgg19", 20480, marks=pytest.mark.full),
        pytest.param("darknet19", 20480, marks=pytest.mark.full),
        pytest.param("resnet50", 65536, marks=pytest.mark.full),
    ],
)
def test_what_11_gib_are_enough_for(name: str, side: int) -> None:
    plan = make_plan(ZOO[name].full(), (1, 3, side, side), budget="11GiB", device="cuda:a100")
    assert plan.peak_bytes <= 11 * GIB
    if name == "resnet50":
        assert {s.tier for s in plan.segments} & {"host", "disk"}
        assert "of maps on the" in str(plan)
