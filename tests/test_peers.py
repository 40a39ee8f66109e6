"""The benchmark of other ways: each computes the gradients of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.peers.alone import errors
from benchmarks.peers.networks import Headed, build
from benchmarks.peers.ours import tiled
from benchmarks.peers.steps import Step, cached, checkpointed, on_cpu, plain
from benchmarks.peers.works import Work

IMAGE = Work("vgg16", 64, width=1 / 16, tile=32)
BACKGROUND = Work("resnet18", 128, width=1 / 16, tile=64, background=0.8)
BAG = Work("resnet18", 48, width=1 / 16, patches=6, rival="caching")


def ours(net: Headed, image: Tensor, work: Work) -> Step:
    return tiled(net, image, work, 4 * 2**20)[0]


PAIRS = [
    (IMAGE, checkpointed),
    (IMAGE, on_cpu),
    (IMAGE, ours),
    (BACKGROUND, checkpointed),
    (BACKGROUND, ours),
    (BAG, cached),
]


@pytest.mark.parametrize(("work", "way"), [*PAIRS, (BAG, ours)], ids=lambda v: getattr(v, "__name__", "") or v.name)
def test_ways_compute_the_same_gradients(work: Work, way: Callable[[Headed, Tensor, Work], Step]) -> None:
    gradients = []
    for each in (plain, way):
        net = build(work.network, work.width, bool(work.patches)).double()
        each(net, work.image().double(), work)()
        gradients.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert expected and found.keys() == expected.keys()
    assert errors(found, expected)["worst_error"] < 1e-9


def test_a_wrong_gradient_shows() -> None:
    expected = {"a": torch.ones(4), "b": torch.full((2,), 10.0)}
    assert errors(expected, expected) == {"error": 0.0, "worst_error": 0.0}
    twice = errors({**expected, "a": 2 * expected["a"]}, expected)
    assert twice["worst_error"] == pytest.approx(1.0)
    assert twice["error"] == pytest.approx(2 / (4 + 200) ** 0.5)
    with pytest.raises(SystemExit, match="no gradient of b"):
        errors({"a": expected["a"]}, expected)
