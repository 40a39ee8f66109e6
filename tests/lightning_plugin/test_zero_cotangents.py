"""Tiles whose cotangents are zero everywhere are not recomputed, and gradients are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.execute.backward import Backward, Evaluation

Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over a drawn region; what is not drawn has the label -100."""
    return nn.functional.cross_entropy(scores, target)


def largest(scores: Tensor, target: Tensor) -> Tensor:
    """The largest score of each class."""
    return scores.flatten(2).max(dim=2).values.square().sum()


def top(scores: Tensor, target: Tensor) -> Tensor:
    return scores.flatten(2).topk(5, dim=2).values.exp().sum()


def nothing(scores: Tensor, target: Tensor) -> Tensor:
    return (scores * 0.0).sum()


LOSSES: dict[str, Loss] = {"drawn": drawn, "largest": largest, "top": top, "nothing": nothing}


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each tile that backward evaluates."""
    found: list[int] = []
    before = Backward.pull_back_tile

    def noted(self: Backward, evaluation: Evaluation) -> None:
        found.append(1)
        before(self, evaluation)

    monkeypatch.setattr(Backward, "pull_back_tile", noted)
    return found


def network(seed: int, strided: bool) -> nn.Module:
    torch.manual_seed(seed)
    step = 2 if strided else 1
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, step, 1), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1), nn.GELU(), nn.Conv2d(5, 3, 1)
    ).double()  # fmt: skip


def step(net: nn.Module, image: Tensor | LazyImage, target: Tensor, loss: Loss) -> list[Tensor]:
    made = loss(net(image), target)
    made.backward()
    return [made.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@given(
    name=st.sampled_from(sorted(LOSSES)), size=st.tuples(st.integers(40, 70), st.integers(40, 90)),
    tiles=st.tuples(st.integers(1, 5), st.integers(2, 6)), batch=st.integers(1, 2), strided=st.booleans(),
    side=st.integers(1, 12), seed=st.integers(0, 99),
)  # fmt: skip
def test_gradients_are_those_of_plain_pytorch(
    name: str, size: tuple[int, int], tiles: tuple[int, int], batch: int, strided: bool, side: int, seed: int
) -> None:
    plain = network(seed, strided)
    tiled = copy.deepcopy(plain)
    image = torch.randn(batch, 3, *size, dtype=torch.float64)
    target = torch.full((batch, *plain(image).shape[2:]), -100)
    target[:, 3 : 3 + side, 5 : 5 + side] = 1
    expected = step(plain, image, target, LOSSES[name])
    found = step(TiledModule(tiled, tiles=tiles), LazyImage.from_tensor(image), target, LOSSES[name])
    assert len(found) == len(expected)  # where no tile has a gradient, weights have one of zeros
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("name", ["drawn", "largest"])
def test_only_tiles_with_a_cotangent_are_recomputed(name: str, evaluated: list[int]) -> None:
    net = network(0, False)
    image = torch.randn(1, 3, 96, 96, dtype=torch.float64)
    target = torch.full((1, 96, 96), -100)
    target[:, 10:20, 10:20] = 1
    scores = TiledModule(net, tiles=(8, 8))(image)  # an ordinary tensor: its gradient is zero outside of the region
    LOSSES[name](scores, target).backward()
    assert 1 <= len(evaluated) <= 9, len(evaluated)
