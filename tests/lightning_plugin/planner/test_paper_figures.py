"""Figures of papers. SFT: float32, batch 1, 10240², ReLU in place. SCORCH: batch 30, 224²."""

from __future__ import annotations

import pytest
import torch

from lightning_plugin import make_plan
from lightning_plugin.planner.analysis.recorded import recorded
from tests.zoo import ZOO
from tests.zoo.resnet import Bottleneck, ResNet

GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("name", "paper"), [("vgg16", 118), pytest.param("vgg19", 129, marks=pytest.mark.full)])
def test_what_plain_pytorch_holds(name: str, paper: float) -> None:
    shape, few = (1, 3, 10240, 10240), {"halo": "recompute"}  # any plan says it: here are fewer to look at
    plan = make_plan(ZOO[name].published(), shape, budget="11GiB", device="cuda:a100", **few)
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
    plan = make_plan(ZOO[name].published(), (1, 3, side, side), budget="11GiB", device="cuda:a100")
    assert plan.peak_bytes <= 11 * GIB
    if name == "resnet50":
        assert {s.tier for s in plan.segments} & {"host", "disk"}
        assert "of maps on the" in str(plan)


#: SCORCH, table 3.1: blocks of each stage, and GiB of weights and tape.
SCORCH = [
    ((3, 8, 36, 3), 0.22, 8.85),
    pytest.param((30, 80, 360, 30), 2.11, 86.23, marks=pytest.mark.full),
    pytest.param((200, 533, 2400, 200), 14.04, 576.08, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("blocks", "weights", "tape"), SCORCH)
def test_weights_and_tape_of_deep_resnets(blocks: tuple[int, ...], weights: float, tape: float) -> None:
    """A tape has the result of each operator on it. PyTorch saves less: of BatchNorm and ReLU only one."""
    with torch.device("meta"):
        net = ResNet(Bottleneck, blocks)
    assert sum(p.numel() * p.element_size() for p in net.parameters()) / GIB == pytest.approx(weights, rel=0.05)
    with recorded(net, (30, 3, 224, 224), torch.float32) as (network, _):
        results = sum(v.bytes for n in network.order for v in n.outputs if v.is_map)
        assert results / GIB == pytest.approx(tape, rel=0.1)
        assert 0.5 * results < network.plain_bytes < 0.6 * results
