"""Numbers that are too large for their type, and statistics of one value: as in plain PyTorch, and named.

In float16 and bfloat16 convolutions and sums overflow where plain PyTorch's do. Tiles add up in another order, so what
is close to the largest number may fall either way; here it is far from it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule

WAYS: list[dict[str, Any]] = [{"tiles": (2, 3)}, {"budget": "1GiB"}]
LARGE = {torch.float16: 3.0e3, torch.bfloat16: 1.0e30}
"""What a channel is multiplied by twice, so that it is beyond the type: 65,504 and 3.4e38."""


class Net(nn.Module):
    """Of its channels the first overflows, in the second of two products."""

    def __init__(self, large: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1, groups=2)
        self.large = large

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([self.large, 1.0, 1.0, 1.0]).to(x.dtype)[:, None, None]
        found = self.one(x).sigmoid() + 1
        return self.two((found * scale).mul(scale).float().to(found.dtype))


def image() -> Tensor:
    return torch.randn(1, 3, 24, 36, generator=torch.Generator().manual_seed(1))


def same(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Not finite at the same places in the same way, and close elsewhere."""
    a, b = a.detach().float(), b.detach().float()
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    assert torch.equal(a[a.isinf()], b[b.isinf()])
    a, b = a[a.isfinite()], b[b.isfinite()]
    if a.numel():
        assert (a - b).abs().max() <= tolerance * max(1.0, float(a.abs().max()))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["of the type", "autocast"])
@pytest.mark.parametrize("dtype", list(LARGE), ids=str)
def test_what_overflows_is_lost_as_in_pytorch_and_named(
    dtype: torch.dtype, autocast: bool, way: dict[str, Any]
) -> None:
    plain = Net(LARGE[dtype])
    net = copy.deepcopy(plain)
    x = image()
    if not autocast:
        plain, net, x = plain.to(dtype), net.to(dtype), x.to(dtype)
    tiled = TiledModule(net, **way)
    losses = []
    for run in (lambda: plain(x), lambda: tiled(LazyImage(x))):
        with torch.autocast("cpu", dtype, enabled=autocast):
            made = run().float().mean((0, 2, 3))
        made[1].backward(retain_graph=True)  # the channels that fit
        losses.append(made.detach())
    assert not losses[0][0].isfinite() and losses[0][1].isfinite(), "the case shows nothing"
    same(losses[1], losses[0], 0.02)
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        same(other.grad, one.grad, 0.05)
    cast = autocast and dtype == torch.float16  # products are float32's, and overflow where the next layer casts them
    first = tiled.non_finite.before or tiled.non_finite if tiled.non_finite else None
    assert first is not None and first.how == "infinite"
    assert ("a cast to float16" if cast else "of mul") in first.what, tiled.non_finite


def test_a_scaler_skips_the_steps_that_it_skips_for_pytorch() -> None:
    """Of losses times a scale that is too large, gradients are infinite: no step is made, and the scale is halved."""

    def train(net: nn.Module, call: Any) -> tuple[list[float], list[Tensor]]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
        scales = []
        for i in range(6):
            with torch.autocast("cpu", torch.float16):
                loss = call(image() + i).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in net.parameters()]

    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    net = copy.deepcopy(plain)
    tiled = TiledModule(net, tiles=(2, 3))
    expected, scales = train(plain, plain), train(net, lambda x: tiled(LazyImage(x)))
    assert expected[0] == scales[0] and len(set(scales[0])) > 2, "no step was skipped"
    for one, other in zip(expected[1], scales[1], strict=True):
        assert (one - other).abs().max() < 0.01


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4)], ids=lambda n: type(n).__name__)
def test_a_statistic_of_one_value_is_refused_as_in_pytorch(norm: nn.Module, way: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), norm)
    with pytest.raises(ValueError, match="more than 1") as expected:
        net(image())
    with pytest.raises(ValueError, match="more than 1") as refused:
        TiledModule(net, **way)(LazyImage(image())).sum().backward()
    assert str(refused.value) == str(expected.value)


class Spread(nn.Module):
    """What is left of an image of one pixel, and how it is spread."""

    def __init__(self, unbiased: bool) -> None:
        super().__init__()
        self.unbiased = unbiased
        self.one, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x))
        return x.var((2, 3), unbiased=self.unbiased) + x.mean((2, 3))


@pytest.mark.parametrize("way", [{}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_an_image_of_one_pixel_has_the_statistics_of_pytorch(unbiased: bool, way: dict[str, Any]) -> None:
    plain = Spread(unbiased).double()
    net = copy.deepcopy(plain)
    x = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    expected, found = plain(x), TiledModule(net, **way)(LazyImage(x))
    expected.sum().backward()
    found.sum().backward()
    same(found, expected, 1e-12)
    assert bool(expected.isnan().all()) == unbiased
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        same(other.grad, one.grad, 1e-9)  # type: ignore[arg-type]
