"""Attributes of recorded maps that are tensors, as plain PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import TiledModule
from tests.exactness import assert_exact
from tests.zoo import fill

X = torch.randn(1, 3, 20, 24, dtype=torch.float64)


class Spectrum(nn.Module):
    """A map, and what a test does with its spectrum."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.fft.rfft2(self.conv(x), norm="ortho"))


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda f: f.real,
    "imag": lambda f: f.imag,
    "both": lambda f: torch.cat([f.real, f.imag], 1),
    "back": lambda f: torch.fft.irfft2(torch.complex(f.real * 2, f.imag), norm="ortho"),
    "mH": lambda f: (f @ f.mH).abs(),
    "mT": lambda f: (f @ f.mT).imag,
    "H": lambda f: f[0, 0].H.imag,
    "T": lambda f: f[0, 0].T.imag,
    "real of real": lambda f: f.abs().real,
    "of a vector": lambda f: f.mean((2, 3)).imag,
}


@pytest.mark.parametrize("name", USES)
def test_parts_and_adjoints_are_plain_pytorchs(name: str) -> None:
    assert_exact(fill(Spectrum(USES[name])), X.shape)


WRONG: dict[str, Callable[[Tensor], Any]] = {"imag": lambda f: f.abs().imag, "H": lambda f: f.H}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_tensor_does_not_have_a_map_does_not_have(name: str) -> None:
    model = Spectrum(WRONG[name]).double()
    with pytest.raises(RuntimeError) as plain:
        model(X)
    with pytest.raises(RuntimeError) as tiled:
        TiledModule(model, tiles=2)(X)
    assert str(tiled.value) == str(plain.value)


class Mirrored(nn.Module):
    """A map whose ``.data`` is set to its transpose, which tiles cut along other axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.data = y.detach().mT.sin()
        return y.square().mean((2, 3))


def test_data_may_be_set_to_a_map_of_another_layout() -> None:
    assert_exact(fill(Mirrored()), (1, 3, 20, 20))
