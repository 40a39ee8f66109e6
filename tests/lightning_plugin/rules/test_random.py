"""Random operators: the same under recompute and on every grid, well distributed, and PyTorch's own where it
can be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout
from lightning_plugin.rules import noise
from lightning_plugin.rules.noise import Stream
from tests.exactness import TOLERANCE, asked, difference
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds

GRIDS = [(1, 1), (3, 2), (5, 4), (13, 1)]


def on_grid(function: Callable[[Tensor], Tensor], x: Tensor, tiles: tuple[int, ...], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return materialize(function(LazyImage.from_tensor(x, engine=asked(tiles, tiles))))


POSITIONAL = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x + 0, 0.3, inplace=True) * 2,
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(2, 3),
    "normal_": lambda x: x * torch.empty_like(x).normal_(2, 3),
    "exponential_": lambda x: x * torch.zeros_like(x).exponential_(0.5),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_the_grid_does_not_change_what_is_drawn(name):
    x = torch.randn(2, 3, 13, 17, dtype=torch.float64)
    first, *others = [on_grid(POSITIONAL[name], x, tiles) for tiles in GRIDS]
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, on_grid(POSITIONAL[name], x, GRIDS[1], seed=1))
    assert not recorded_kinds(POSITIONAL[name], x.shape)["Barrier"]


def test_a_layout_in_another_order_is_tiled_alike():
    x = torch.randn(2, 3, 13, 17, dtype=torch.float64)
    function = lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.5)  # noqa: E731
    assert torch.equal(on_grid(function, x, (1, 1)), on_grid(function, x, (4, 3)))


class Dropped(nn.Module):
    """Dropout in the middle of a network, or a given mask in its place."""

    def __init__(self, drop: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).square().mean()


@pytest.mark.parametrize("p", [0.2, 0.5, 1.0])
def test_dropout_in_a_network_is_a_product_with_its_mask(p):
    """The mask is what dropout makes of ones; with it, plain PyTorch has the same gradients."""
    x = torch.randn(2, 3, 15, 11, dtype=torch.float64, requires_grad=True)
    mask = on_grid(lambda x: F.dropout(torch.ones_like(x[:, :1].expand(-1, 4, -1, -1)), p), x.detach(), (3, 2), seed=7)
    net = Dropped(lambda h: h * mask).double()
    twin = copy.deepcopy(net)
    twin.drop = lambda h: F.dropout(h, p)
    net(x).backward()
    other = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    twin(LazyImage.from_tensor(other, engine=asked((4, 3), (2, 5)))).backward()
    assert difference(other.grad, x.grad) < TOLERANCE
    for a, b in zip(twin.parameters(), net.parameters(), strict=True):
        assert difference(a.grad, b.grad, 1e-12) < TOLERANCE


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(4, 8, 64, 64, dtype=torch.float64)
    out = on_grid(lambda x: F.alpha_dropout(x, 0.3, training=True), x, (3, 3))
    assert abs(out.mean()) < 0.02 and abs(out.var() - 1) < 0.03
    dropped = -noise_alpha(0.3) * 0.7
    assert abs((out - dropped).abs().lt(1e-12).double().mean() - 0.3) < 0.01


def test_a_coin_is_fair_unless_said_otherwise():
    x = torch.zeros(1, 4, 64, 64)
    assert abs(on_grid(lambda x: (x * 1).bernoulli_(), x, (3, 3)).mean() - 0.5) < 0.02
    assert abs(on_grid(lambda x: (x * 1).bernoulli_(0.2), x, (3, 3)).mean() - 0.2) < 0.02


HALVES = {
    "bernoulli_": lambda h: (h * 1).bernoulli_(0.5),
    "F.dropout in place": lambda h: F.dropout(h * 0 + 1, 0.5, inplace=True) / 2,
    "torch.dropout_": lambda h: torch.dropout_(h * 0 + 1, 0.5, True) / 2,
    "attention": lambda h: attended(h, 0.5).ge(1e-9).double(),
}


def attended(h: Tensor, p: float) -> Tensor:
    """Attention whose features are an axis of space, which has no rule and is taken apart into operators. A query is
    zero if its one key is dropped."""
    one = torch.ones(*h.shape[:-2], 1, h.shape[-1], dtype=h.dtype)
    return F.scaled_dot_product_attention(h, one, one, dropout_p=p)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_an_argument_that_equals_its_default_in_place_is_kept(name, vector):
    """PyTorch leaves it out of the call, and the out-of-place form of `bernoulli_` has no default."""
    x = torch.randn(1, 4, 64, 64, dtype=torch.float64)
    pooled = lambda x: HALVES[name](x.mean((2, 3), keepdim=True) + x[0, 0, 0, 0].detach() + torch.zeros(1, 4, 64, 64))  # noqa: E731
    drawn = on_grid(pooled if vector else HALVES[name], x, (3, 3))
    assert abs(drawn.mean() - 0.5) < 0.05 and set(drawn.unique().tolist()) == {0, 1}


def test_what_is_drawn_by_default():
    x = -torch.ones(1, 4, 64, 64, dtype=torch.float64)
    slopes = -on_grid(lambda x: F.rrelu(x, training=True), x, (3, 3))
    assert 1 / 8 <= slopes.min() < 0.13 and 0.33 < slopes.max() <= 1 / 3
    assert abs(on_grid(lambda x: (x * 1).exponential_(), x, (3, 3)).mean() - 1) < 0.05


def noise_alpha(p: float) -> float:
    alpha = 1.7580993408473766
    return alpha / math.sqrt((alpha * alpha * p + 1) * (1 - p))


CHANNELS = {
    "dropout2d": (lambda x: F.dropout2d(x, 0.5), (3, 5, 7, 6)),
    "dropout2d in place": (lambda x: F.dropout2d(x + 0, 0.5, inplace=True), (3, 5, 7, 6)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), (3, 5, 17)),
    "dropout3d": (lambda x: F.dropout3d(x, 0.5), (3, 5, 4, 5, 6)),
    "dropout3d of one": (lambda x: F.dropout3d(x, 0.5), (5, 4, 5, 6)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), (3, 5, 7, 6)),
    "all channels": (lambda x: F.dropout2d(x, 1.0), (3, 5, 7, 6)),
    "a drawn mask": (lambda x: x * x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.5).div_(0.5), (3, 5, 7, 6)),
    "two calls": (lambda x: F.dropout2d(x, 0.5) + F.dropout2d(x, 0.2), (3, 5, 7, 6)),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_channel_dropout_equals_pytorch_bit_for_bit(name):
    function, shape = CHANNELS[name]
    x = torch.randn(shape)
    tiled = on_grid(function, x, (3, 2), seed=5)
    torch.manual_seed(5)
    assert torch.equal(tiled, function(x))
    assert not recorded_kinds(function, shape)["Barrier"]


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "rrelu"])
def test_nothing_is_drawn_outside_of_training(name):
    x = torch.randn(2, 3, 9, 8)
    function = lambda x: getattr(F, name)(x, training=False) * 1  # noqa: E731
    assert torch.equal(on_grid(function, x, (2, 3)), function(x))


class DropPath(nn.Module):
    """Stochastic depth as timm and torchvision write it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.5)
        return x * mask.div_(0.5)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.drop = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        return F.dropout(x.mean((2, 3)), 0.5).sum()


def test_stochastic_depth_and_a_last_dropout_draw_what_plain_pytorch_draws():
    net = Residual().double()
    twin = copy.deepcopy(net)
    x = torch.randn(6, 3, 21, 17, dtype=torch.float64)
    torch.manual_seed(3)
    expected = net(x)
    expected.backward()
    torch.manual_seed(3)
    actual = twin(LazyImage.from_tensor(x, engine=asked((3, 2), (2, 2))))
    actual.backward()
    assert difference(materialize(actual).detach(), expected.detach()) < TOLERANCE
    for a, b in zip(twin.parameters(), net.parameters(), strict=True):
        assert difference(a.grad, b.grad, 1e-9) < TOLERANCE


# The generator ----------------------------------------------------------------------------------------------


def layout(*shape: int) -> Layout:
    return Layout.channels_first(shape)


def draw(call: int, key: int, shape: tuple[int, ...], name: str = "uniform") -> Tensor:
    lay = layout(*shape)
    return getattr(Stream(call), name)(torch.tensor(key), lay, Box.whole(lay.extent), torch.float64)


SHAPE = (2, 8, 128, 128)


def test_uniform_numbers_are_uniform():
    """Every decile, and every one of the 53 bits, has its share: within five standard deviations."""
    u = draw(1, 42, SHAPE).flatten()
    n = u.numel()
    counts = torch.histc(u, 10, 0, 1)
    assert (counts - n / 10).abs().max() < 5 * math.sqrt(n * 0.09)
    bits = (u * 2.0**53).long()
    ones = torch.stack([(bits >> i & 1).sum() for i in range(53)])
    assert (ones - n / 2).abs().max() < 5 * math.sqrt(n / 4)
    assert u.min() >= 0 and u.max() < 1


@pytest.mark.parametrize(
    ("name", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("normal", 0, 1), ("exponential", 1, 1)]
)
def test_moments(name, mean, variance):
    z = draw(3, 7, SHAPE, name)
    tolerance = 6 * math.sqrt(variance / z.numel())
    assert abs(z.mean() - mean) < tolerance
    assert abs(z.var() - variance) < 4 * tolerance


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs().item()


def test_channels_positions_calls_and_keys_are_independent():
    u = draw(1, 42, SHAPE)
    bound = 5 / math.sqrt(u.numel() / 8)
    assert correlation(u[:, 1:], u[:, :-1]) < bound
    assert correlation(u[0], u[1]) < bound
    assert correlation(u[..., 1:], u[..., :-1]) < bound
    assert correlation(u[:, :, 1:], u[:, :, :-1]) < bound
    for other in ((2, 42), (1, 43), (1, 42 + 2**61)):
        assert correlation(u, draw(*other, SHAPE)) < bound


def test_nearby_positions_of_a_huge_map_differ():
    """The index of an element goes beyond 32 bits."""
    lay = layout(1, 4, 2**20, 2**20)
    box = Box((2**19, 2**19), (2**19 + 64, 2**19 + 64))
    u = Stream(1).uniform(torch.tensor(42), lay, box, torch.float64)
    assert u.unique().numel() == u.numel()
    assert abs(u.mean() - 0.5) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_one_in_every_type(dtype):
    lay = layout(*SHAPE)
    u = Stream(1).uniform(torch.tensor(9), lay, Box.whole(lay.extent), dtype)
    assert u.max() < 1 and abs(u.double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropped_fraction(p):
    lay = layout(*SHAPE)
    keep = Stream(5).keep(torch.tensor(1), p, lay, Box.whole(lay.extent)).double()
    assert abs(keep.mean() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / keep.numel())


def test_long_tiles_are_drawn_in_chunks(monkeypatch):
    whole = draw(1, 42, (2, 3, 7, 11))
    for size in (1, 5, 11, 30, 100):
        monkeypatch.setattr(noise, "CHUNK", size)
        assert torch.equal(draw(1, 42, (2, 3, 7, 11)), whole)


@settings(max_examples=25)
@given(st.data())
def test_a_tile_is_a_part_of_the_whole(data):
    """In any layout, with space anywhere and flattened."""
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    dims = data.draw(
        st.sampled_from(
            [((2,), (3,), (Axis(0),), (Axis(1),)), ((2, Axis(0), Axis(1)), (3,)), ((Axis(1), 2), (Axis(0),))]
        )
    )
    lay = Layout(dims, (height, width))
    full = Box.whole((height, width))
    lo = (data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1)))
    hi = (data.draw(st.integers(lo[0] + 1, height)), data.draw(st.integers(lo[1] + 1, width)))
    stream, key = Stream(4), torch.tensor(2**40 + 17)
    whole = stream.uniform(key, lay, full, torch.float64)
    assert torch.equal(stream.uniform(key, lay, Box(lo, hi), torch.float64), lay.narrow(whole, full, Box(lo, hi)))


def test_the_slope_of_rrelu_in_evaluation_is_the_mean_of_its_bounds() -> None:
    """By itself `torch.rrelu` names none of them."""
    assert_tiled(After(torch.rrelu), (2, 3, 9, 8))
    assert_tiled(After(lambda x: torch.rrelu(x, 0.1, 0.7)), (2, 3, 9, 8))
