"""Tiles whose cotangents are zero everywhere are not recomputed, and gradients are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.execute.backward import Backward, Evaluation
from tests.exactness import assert_same_step

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


def step(net: nn.Module, image: Tensor | LazyImage, target: Tensor, loss: Loss) -> list[Tensor | None]:
    made = loss(net(image), target)
    made.backward()
    return [made.detach(), *(p.grad for p in net.parameters())]


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
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and theirs is not None  # where no tile has a gradient, weights have one of zeros
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9 * max(1.0, float(theirs.abs().max())))


class Stacked(nn.Module):
    """Two branches, one above the other in the map that is read next, and one whose result is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.bottom, self.detached = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [F.max_pool2d(self.top(x), 2), self.norm(F.max_pool2d(self.bottom(x), 2))]
        return self.last(torch.cat(maps, 2)) * F.avg_pool2d(self.detached(x).detach(), (1, 2))


@pytest.mark.parametrize("options", [{"tiles": (1, 1)}, {"tiles": (4, 2)}, {"budget": "500KiB"}, {"budget": "9MiB"}])
@pytest.mark.parametrize(
    "loss", [lambda y: y[:, :, :16].sum(), lambda y: y[:, :, 40:].sum(), lambda y: (y * 0).sum(), lambda y: y.sum()]
)
def test_branches_that_no_tile_with_a_cotangent_reads(loss: Callable[[Tensor], Tensor], options: dict) -> None:
    """Weights have a gradient of zeros, or none, as in plain PyTorch: weight decay and momentum tell them apart."""
    torch.manual_seed(0)
    plain = Stacked().double()
    tiled = copy.deepcopy(plain)
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    assert_same_step(plain, tiled, loss(plain(x)), loss(TiledModule(tiled, **options)(twin)))
    torch.testing.assert_close(twin.grad, x.grad, rtol=0, atol=1e-9 * float(x.grad.abs().max() + 1))


@pytest.mark.parametrize("name", ["drawn", "largest"])
def test_only_tiles_with_a_cotangent_are_recomputed(name: str, evaluated: list[int]) -> None:
    net = network(0, False)
    image = torch.randn(1, 3, 96, 96, dtype=torch.float64)
    target = torch.full((1, 96, 96), -100)
    target[:, 10:20, 10:20] = 1
    scores = TiledModule(net, tiles=(8, 8))(image)  # an ordinary tensor: its gradient is zero outside of the region
    LOSSES[name](scores, target).backward()
    assert 1 <= len(evaluated) <= 9, len(evaluated)


def overwritten(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Return a function that writes into a map, or a part of it, and reads the map."""

    def run(y: Tensor) -> Tensor:
        y = y * 1
        write(y)
        return y

    return run


#: Functions of a map whose derivative is zero, absent, or not seen by autograd.
STEPPED: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("sign", "round", "floor", "ceil", "trunc", "zeros_like")},
    "sgn": torch.sgn,
    "round to two digits": lambda y: y.round(decimals=2),
    "floor_": overwritten(lambda y: y.floor_()),
    "floor divided": lambda y: torch.div(y, 0.3, rounding_mode="floor"),
    "norm of order 0": lambda y: torch.linalg.vector_norm(y, 0, dim=(2, 3)),
    "norm of order 0, of rows": lambda y: y.norm(p=0, dim=3),
    "count": lambda y: (y > 0).sum((2, 3)),
    "overwritten by noise": overwritten(lambda y: y.uniform_()),
    "overwritten by ones": overwritten(lambda y: y.fill_(1)),
    "overwritten by a copy": overwritten(lambda y: y.copy_(y.detach())),
    "overwritten through a view": overwritten(lambda y: y.transpose(1, 2).copy_(y.detach().transpose(1, 2))),
    "compared in place": overwritten(lambda y: y.ge_(0.1)),
    "negated in place": overwritten(lambda y: y.logical_not_()),
    "detached in place": lambda y: (y * 1).detach_(),
    "without a derivative": torch.special.bessel_j0,
    "without a derivative, whole": lambda y: torch.histc(y.detach() + y, 8, -1, 1),
    "a result without a derivative": lambda y: torch.linalg.lu_factor_ex(y)[0],
    "the sign of a mean": lambda y: y.mean((2, 3)).sign(),
    "a polynomial of a mean": lambda y: torch.special.legendre_polynomial_p(y.mean((2, 3)), 2),
}


class Stepped(nn.Module):
    """A layer before a function of ``STEPPED``, another beside it; ``said``: what its result says of grad."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.beside, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1), function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.function(self.before(x))
        self.said = found.requires_grad, found.grad_fn is not None
        return found, self.beside(x).mean()


@pytest.mark.parametrize("options", [{"tiles": (2, 2)}, {"budget": "900KiB"}], ids=str)
@pytest.mark.parametrize("name", list(STEPPED))
def test_functions_without_a_slope_have_gradients_as_in_plain_pytorch(name: str, options: dict) -> None:
    """Weights before them have a gradient of zeros where plain PyTorch's have, and none where those have none."""
    torch.manual_seed(0)
    plain = Stepped(STEPPED[name]).double()
    tiled = copy.deepcopy(plain)
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    expected, found = plain(x), TiledModule(tiled, **options)(x)
    assert tiled.said == plain.said
    assert found[0].requires_grad == expected[0].requires_grad
    weight = 0 if name == "overwritten by noise" else 1  # its numbers are the engine's own
    losses = [results[0].double().sum() * weight + results[1] for results in (expected, found)]
    assert_same_step(plain, tiled, *losses)
