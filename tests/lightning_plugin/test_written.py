"""Tensors of the user's own that a forward writes in place: the image it is given, and buffers that it has read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import RecordingError, TiledModule
from tests.exactness import TOLERANCE, assert_same_step, difference
from tests.zoo import fill


class Centred(nn.Module):
    """Takes off a centre, which moves towards the mean of the batch (DINO)."""

    def __init__(self, move: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.conv, self.move = nn.Conv2d(3, 4, 3), move
        self.register_buffer("centre", torch.full((1, 4, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x)
        before = features - self.centre
        with torch.no_grad():
            self.move(self.centre, features.mean((0, 2, 3), keepdim=True))
        return before * (self.centre + 1)


MOVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "lerp_": lambda centre, mean: centre.lerp_(mean, 0.1),
    "copy_": lambda centre, mean: centre.copy_(0.9 * centre + 0.1 * mean),
    "setitem": lambda centre, mean: centre.__setitem__(..., mean),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_buffer_that_was_read_may_be_written(name: str) -> None:
    plain = fill(Centred(MOVES[name]).double())
    module = copy.deepcopy(plain)
    tiled = TiledModule(module, tiles=2)
    for _ in range(3):
        x = torch.randn(2, 3, 20, 22, dtype=torch.float64)
        plain.zero_grad()
        module.zero_grad()
        assert_same_step(plain, module, plain(x).square().mean(), tiled(x).square().mean())
        assert difference(module.centre, plain.centre) < TOLERANCE


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 2, 3), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.conv(x)


def several(x: Tensor) -> None:
    x.mul_(2).add_(1)
    x[:, 0] = 0
    x[:, 1].mul_(3)
    x[..., 3:9].clamp_(min=0)
    x -= x.mean()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "relu": nn.ReLU(inplace=True),
    "scale": lambda x: x.mul_(0.5),
    "view": lambda x: x[:, 1:].neg_(),
    "several": several,
}


@pytest.mark.parametrize("name", WRITES)
def test_an_image_is_written_as_by_plain_pytorch(name: str) -> None:
    plain = fill(Writes(WRITES[name]).double())
    module = copy.deepcopy(plain)
    tiled = TiledModule(module, tiles=2)
    for _ in range(2):
        x = torch.randn(2, 3, 16, 18, dtype=torch.float64)
        y = x.clone()
        plain.zero_grad()
        module.zero_grad()
        assert_same_step(plain, module, plain(x).square().mean(), tiled(y).square().mean())
        assert difference(y, x) < TOLERANCE


def test_an_image_that_was_read_before_is_not_written() -> None:
    class Late(Writes):
        def forward(self, x: Tensor) -> Tensor:
            first = self.conv(x)
            self.write(x)
            return first + self.conv(x)

    with pytest.raises(RecordingError, match=r"image .* was changed in place after convolution in 'conv' used it"):
        TiledModule(Late(WRITES["scale"]), tiles=2)(torch.zeros(1, 3, 16, 18))


# Masks under a budget ------------------------------------------------------------------------------------------------

MASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scaled": lambda y, m: y.__setitem__(m.expand_as(y), y[m.expand_as(y)] * 2),
    "nothing": lambda y, m: y.__setitem__(m.expand_as(y) & False, y[m.expand_as(y) & False] * 2),
    "pixels": lambda y, m: y.movedim(1, -1).__setitem__(m[:, 0], torch.arange(6, dtype=y.dtype)),
    "by the map": lambda y, m: y.__setitem__(y < 0, y[y < 0] * 0.1),
    "one number by the map": lambda y, m: y.__setitem__(y < 0, 0.5),
}


class Masked(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 6, 3, padding=1), write

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.conv(x).clone()
        self.write(y, mask)
        return y.square().mean((2, 3))


@pytest.mark.parametrize("how", [{"tiles": (2, 3)}, {"budget": "2MiB"}], ids=["tiled", "kept"])
@pytest.mark.parametrize("name", MASKED)
def test_values_written_where_a_mask_says(name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Masked(MASKED[name]).double()
    other = copy.deepcopy(net)
    x, mask = torch.randn(2, 3, 12, 14, dtype=torch.float64), torch.randn(2, 1, 12, 14) > 0
    assert_same_step(net, other, net(x, mask).sum(), TiledModule(other, **how)(x, mask).sum())


# Operators whose in-place form has another signature ------------------------------------------------------------------

POWERS: dict[str, Callable[[Tensor], Any]] = {
    "square_": lambda y: y.square_(),
    "pow_": lambda y: y.pow_(3),
    "pow_ by a map": lambda y: y.abs_().pow_(torch.sigmoid(y)),
    "float_power_": lambda y: y.float_power_(2),
    "floor_divide_": lambda y: y.copy_(y.detach().floor_divide_(torch.full((1, 1, 1, 1), 0.3, dtype=y.dtype))),
}


@pytest.mark.parametrize("how", [{"tiles": (2, 3)}, {"budget": "2MiB"}], ids=["tiled", "kept"])
@pytest.mark.parametrize("name", POWERS)
def test_powers_in_place(name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Masked(lambda y, mask: POWERS[name](y)).double()
    other = copy.deepcopy(net)
    x, mask = torch.randn(2, 3, 12, 14, dtype=torch.float64), torch.zeros(())
    assert_same_step(net, other, net(x, mask).sum(), TiledModule(other, **how)(x, mask).sum())


class Overwritten(nn.Module):
    """A map or a vector that is overwritten by another one."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor], vector: bool) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.write, self.vector = write, vector

    def forward(self, x: Tensor) -> Tensor:
        pooled = (2, 3) if self.vector else ()
        h, new = (layer(x).mean(pooled, keepdim=True) if pooled else layer(x) for layer in (self.conv, self.other))
        return self.write(h * 1, new)


def put(index: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def write(h: Tensor, new: Tensor) -> Tensor:
        h[index] = new[index]
        return h

    return write


OVERWRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy_": lambda h, new: h.copy_(new),
    "copy_ of a number": lambda h, new: h.copy_(2.0) + new,
    "all": put(...),
    "channels": put((slice(None), slice(0, 4))),
    "rows": put((slice(None), slice(None), slice(0, 99))),
    "images": put((0,)),
    "indices": put((slice(None), torch.arange(4))),
    "slice_scatter": lambda h, new: torch.slice_scatter(h, new, 1, 0, 4),
    "select_scatter": lambda h, new: torch.select_scatter(h, new[0], 0, 0),
    "slice_scatter of numbers": lambda h, new: torch.slice_scatter(h, torch.ones_like(new), 1, 0, 4) * new,
}


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "1MiB"}])
@pytest.mark.parametrize("name", OVERWRITES)
def test_what_was_overwritten_has_a_gradient_of_zeros(name: str, how: dict[str, Any], vector: bool) -> None:
    """As in PyTorch, where it is not None: an optimizer decays its weights."""
    plain = fill(Overwritten(OVERWRITES[name], vector).double())
    module = copy.deepcopy(plain)
    x = torch.randn(1, 3, 9, 11, dtype=torch.float64)
    assert_same_step(plain, module, plain(x).square().sum(), TiledModule(module, **how)(x).square().sum())
    assert plain.conv.weight.grad is not None and not plain.conv.weight.grad.any()
