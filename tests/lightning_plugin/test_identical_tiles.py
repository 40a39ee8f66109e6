"""Tiles whose input is identical are computed once, and nothing but time tells."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, make_plan, materialize
from lightning_plugin.boxes import Box
from lightning_plugin.progress import Kind
from tests.exactness import TOLERANCE, compare, flat
from tests.lightning_plugin.background import Background
from tests.lightning_plugin.cases import still
from tests.lightning_plugin.outside import account
from tests.zoo import ZOO, fill


def slide(channels: int = 3, side: int = 120, batch: int = 1) -> Background:
    generator = torch.Generator().manual_seed(3)
    x = torch.full((batch, channels, side, side + 9), 0.7, dtype=torch.float64)
    tissue = Box((side // 3, side // 4), (side // 2, side // 2))
    part = x[..., tissue.lo[0] : tissue.hi[0], tissue.lo[1] : tissue.hi[1]]
    part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return Background(x, tissue, 0.7)


class Count:
    """How many tiles were asked for, and how many of them cost nothing."""

    def __init__(self) -> None:
        self.tiles = self.saved = 0

    def on_tiles(self, count: int) -> None:
        self.tiles += count

    def on_identical_tiles(self, count: int) -> None:
        self.saved += count

    def on_wait(self, kind: Kind, seconds: float) -> None:
        return


def counted(tiled: TiledModule) -> Count:
    """Counts the tiles of a module's steps."""
    count = Count()
    tiled.engine.progress.listeners.append(count)
    return count


def plainly() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3, stride=2),
        nn.GroupNorm(2, 4), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 3, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


class Attention(nn.Module):
    """Gated attention over positions, and a maximum with ties all over the background."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2), nn.Tanh())
        self.gate = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).flatten(2)
        weights = self.gate(self.body(x)).flatten(2).softmax(-1)
        return (h * weights).sum(-1), h.amax(-1)


full = pytest.mark.full
NETWORKS = {
    "plain": plainly,
    "attention": Attention,
    "resnet18": ZOO["resnet18"].build,
    "vgg16_mean": ZOO["vgg16_mean"].build,
    "unet_bilinear": ZOO["unet_bilinear"].build,
}


#: What takes longest, and is like the others.
LONG = "unet_bilinear", "resnet18"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "batch"),
    [
        pytest.param(name, train, batch, marks=[] if batch == (1 if train else 2) and name not in LONG else full)
        for name in NETWORKS
        for train in (True, False)
        for batch in (1, 2)
    ],
)
def test_identical_tiles_change_nothing(name: str, train: bool, batch: int) -> None:
    source = slide(side=96, batch=batch)
    plain = still(fill(NETWORKS[name]().double())).train(train)
    net = copy.deepcopy(plain)
    expected = flat(plain(source.tensor))
    tiled = TiledModule(net, tiles=(7, 9), backward_tiles=(6, 8))
    count = counted(tiled)
    actual = flat(tiled(LazyImage(source)))
    weights = [torch.randn_like(e) for e in expected]
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()  # type: ignore[union-attr]
    sum((materialize(a) * w).sum() for a, w in zip(actual, weights, strict=True)).backward()  # type: ignore[union-attr]
    found = compare(plain, net, [materialize(a) for a in actual], expected, (None, None))
    assert max(found.values()) < TOLERANCE, found
    if name != "unet_bilinear":  # whose cotangents on a map of weights are all different
        assert count.saved > 20, "hardly any tile was found identical"


def test_dropout_is_drawn_for_every_position() -> None:
    """Background under dropout is not the same everywhere: no tile stands for another."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 2, 1)).double()
    tiled = TiledModule(net, tiles=(6, 6))
    count = counted(tiled)
    out = materialize(tiled(LazyImage(slide())))
    assert count.tiles == 36
    assert count.saved == 0
    assert out[..., 60:, 80:].std() > 0.01


def test_what_differs_at_a_border_is_not_shared() -> None:
    """Zeros are padded at the image's own border, so background looks otherwise there."""
    net = nn.Conv2d(3, 2, 5, padding=2).double()
    source = slide()
    out = materialize(TiledModule(net, tiles=(7, 5))(LazyImage(source)))
    assert torch.allclose(out, net(source.tensor), atol=1e-12)


class Gated(nn.Module):
    """Pixels, or features, that are multiplied by a number for each position, of which the gradient is asked."""

    def __init__(self, pixels: bool) -> None:
        super().__init__()
        self.pixels = pixels
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, 2, 1), nn.Tanh())

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        if self.pixels:
            x = 1 + nn.functional.interpolate(gate, scale_factor=4, mode="nearest") * (x - 1)
            return self.body(x).square().sum()
        return (self.body(x) * gate).square().sum()


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("spread", [True, False])
def test_a_gate_of_ones_leaves_tiles_identical(pixels: bool, spread: bool) -> None:
    torch.manual_seed(0)
    plain, source = Gated(pixels).double().requires_grad_(False), slide()
    source.tensor = source.tensor[..., :120].contiguous()
    gate = torch.ones(1, 1, 30, 30, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(gate, source.tensor), gate)
    tiled = TiledModule(copy.deepcopy(plain), tiles=(8, 8))
    count = counted(tiled)
    if spread:  # an ordinary tensor meets the map
        tiled.module.forward = partial(tiled.module.forward, gate)  # type: ignore[method-assign]
    out = tiled(LazyImage(source)) if spread else tiled(gate, LazyImage(source))
    (actual,) = torch.autograd.grad(materialize(out), gate)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert count.saved > 0.3 * count.tiles


LAYERS = st.one_of(
    st.builds(
        lambda kernel, stride, dilation, pad: nn.Conv2d(3, 3, kernel, stride, pad * (kernel // 2), dilation),
        st.sampled_from([1, 3, 7, 9, 13]), st.integers(1, 2), st.integers(1, 2), st.sampled_from([0, 1, 1]),
    ),
    st.builds(lambda kernel: nn.MaxPool2d(kernel, 1, kernel // 2), st.integers(2, 7)),
    st.builds(lambda kernel, counts: nn.AvgPool2d(kernel, 2, kernel // 2, count_include_pad=counts),
              st.integers(2, 7), st.booleans()),
    st.builds(lambda factor: nn.Upsample(scale_factor=factor), st.sampled_from([1.5, 2, 3])),
    st.just(nn.Tanh()),
)  # fmt: skip


@example(layers=[nn.Conv2d(3, 3, 13, 1, 6)], size=(9, 9), tissue=0, tiles=(3, 9), back=(9, 9))
@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4),
    size=st.tuples(st.integers(5, 30), st.integers(5, 12)),
    tissue=st.sampled_from([0, 0, 0, 3]),
    tiles=st.tuples(st.integers(1, 6), st.integers(4, 12)),
    back=st.tuples(st.integers(1, 6), st.integers(4, 12)),
)
def test_windows_of_any_size_on_background(
    layers: list[nn.Module], size: tuple[int, int], tissue: int, tiles: tuple[int, int], back: tuple[int, int]
) -> None:
    """Also windows that are wider than tiles, of which each near the border is padded by another length."""
    torch.manual_seed(size[0])
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), *copy.deepcopy(layers)).double()
    for p in plain.parameters():
        p.data.normal_()
    net = copy.deepcopy(plain)
    x = torch.full((1, 3, *size), 0.7, dtype=torch.float64)
    x[..., :tissue, :tissue] = torch.randn(tissue, tissue, dtype=torch.float64)
    try:
        expected = plain(x)
    except RuntimeError:
        assume(False)  # PyTorch refuses: nothing is left of the image
    source = Background(x, Box((0, 0), (tissue, tissue)), 0.7)
    actual = TiledModule(net, tiles=tiles, backward_tiles=back)(LazyImage(source))
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (materialize(actual) * weights).sum().backward()
    found = compare(plain, net, [materialize(actual)], [expected], (None, None))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
@pytest.mark.usefixtures("free_tiles")
@pytest.mark.parametrize("budget", ["150KiB", "400KiB"])
def test_the_budget_is_kept_with_identical_tiles(budget: str) -> None:
    source = slide(side=200)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)
    ).double()
    planned = make_plan(net, LazyImage(source), budget=budget)
    tiled = TiledModule(net, budget=budget)
    count = counted(tiled)
    found = account(lambda: tiled(LazyImage(source)).sum().backward(), net)
    assert count.saved > 0
    assert planned.budget is not None and found.held <= planned.budget


@pytest.mark.parametrize("groups", [1, 5, 40])
def test_identical_tiles_with_cotangents_in_many_groups(groups: int) -> None:
    """More groups than are looked for, and fewer: tiles are the same, and what comes back to them is not."""
    side, count = 6, 12
    image = slide(side=side * count)
    net = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()
    tiled = TiledModule(copy.deepcopy(net), tiles=(count, count))
    weight = 1 + torch.arange(count * count, dtype=torch.float64).reshape(count, count) % groups
    weight = nn.functional.interpolate(weight[None, None], size=image.shape[2:])
    expected, actual = net(image.tensor), materialize(tiled(LazyImage(image)))
    for out in (expected, actual):
        (out * weight).square().sum().backward()
    errors = compare(net, tiled.module, [actual], [expected], (None, None))
    assert max(errors.values()) < TOLERANCE, errors
