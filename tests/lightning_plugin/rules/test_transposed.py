"""Transposed convolutions: every stride, padding, output padding, dilation and group against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lightning_plugin.rules.helpers import assert_tiled

CASES: list[dict[str, Any]] = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 4, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 1, "stride": 3},
    {"kernel_size": 2, "stride": 5, "output_padding": 3, "bias": False},
    {"kernel_size": 3, "stride": 3, "padding": 3, "dilation": 2, "output_padding": 2},
    {"kernel_size": 3, "stride": 2, "groups": 2},
    {"kernel_size": 3, "stride": 2, "groups": 4, "padding": 2},
]


class Up(nn.Module):
    """A convolution, a transposed one, and a convolution on what it makes."""

    def __init__(self, axes: int = 2, output_size: Any = None, **how: Any):
        super().__init__()
        convolution, up = [
            (nn.Conv1d, nn.ConvTranspose1d),
            (nn.Conv2d, nn.ConvTranspose2d),
            (nn.Conv3d, nn.ConvTranspose3d),
        ][axes - 1]
        self.before = convolution(3, 4, 3, padding=1)
        self.up = up(4, 4, **how)
        self.after = convolution(4, 2, 3, padding=1)
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(self.up(x) if self.output_size is None else self.up(x, output_size=self.output_size))


@pytest.mark.parametrize("tiles,backward", [((3, 2), (2, 3)), ((5, 7), (1, 1))])
@pytest.mark.parametrize("how", CASES, ids=str)
def test_2d(how: dict[str, Any], tiles: Any, backward: Any) -> None:
    assert_tiled(Up(**how), (2, 3, 7, 6), tiles=tiles, backward_tiles=backward)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("how", [CASES[1], CASES[5]], ids=str)
def test_1d_and_3d(axes: int, how: dict[str, Any]) -> None:
    assert_tiled(Up(axes, **how), (1, 3, 5, 4, 3)[: 2 + axes], tiles=(3, 2, 2)[:axes], backward_tiles=(2, 1, 3)[:axes])


def test_output_size() -> None:
    assert_tiled(Up(kernel_size=3, stride=2, padding=1, output_size=(12, 13)), (1, 3, 6, 7))


def test_last_operator() -> None:
    """The output is stored as it is, without a convolution behind it that would hide a border."""
    assert_tiled(
        nn.ConvTranspose2d(3, 2, 3, stride=4, output_padding=(3, 2)), (1, 3, 5, 3), tiles=(9, 4), backward_tiles=(4, 9)
    )


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), kernel=st.integers(1, 4), stride=st.integers(1, 4),
    padding=st.integers(0, 3), dilation=st.integers(1, 2), extra=st.integers(0, 3),
    tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any(size: Any, kernel: int, stride: int, padding: int, dilation: int, extra: int, tiles: Any) -> None:
    assume(extra < max(stride, dilation))
    assume(all((n - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0 for n in size))
    net = nn.ConvTranspose2d(2, 2, kernel, stride, padding, extra, dilation=dilation)
    assert_tiled(net, (1, 2, *size), tiles=tiles, backward_tiles=tiles[::-1])
