"""Padding: all modes, asymmetric and negative, over space and channels, and convolutions that pad in these modes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.exactness import asked
from tests.lightning_plugin.rules.helpers import After, assert_tiled
from tests.sampling import sampled

MODES = ["constant", "reflect", "replicate", "circular"]
GRIDS = [((3, 2), (2, 3)), ((5, 7), (1, 1))]
PADS = [(1, 2, 3, 0), (4, 4, 4, 4), (-2, 3, 0, -4), (0, 0, 6, 5), (-1, -2, -3, -1)]


@pytest.mark.parametrize(("mode", "pads", "grids"), sampled(MODES, PADS, GRIDS, every=2))
def test_2d(mode: str, pads: Any, grids: Any) -> None:
    tiles, backward = grids
    assert_tiled(After(partial(F.pad, pad=pads, mode=mode)), (2, 3, 11, 7), tiles=tiles, backward_tiles=backward)


@pytest.mark.parametrize("mode", MODES)
def test_1d_and_3d(mode: str) -> None:
    assert_tiled(After(partial(F.pad, pad=(3, 2), mode=mode), axes=1), (2, 3, 11), tiles=(4,), backward_tiles=(3,))
    net = After(partial(F.pad, pad=(1, 2, 0, 3, 2, 1), mode=mode), axes=3)
    assert_tiled(net, (1, 3, 5, 6, 4), tiles=(2, 3, 2), backward_tiles=(3, 1, 2))


@pytest.mark.parametrize("value", [0.0, -1.5, float(2**20)])
def test_value(value: float) -> None:
    assert_tiled(
        After(lambda x: F.pad(x, (2, 9, 8, 1), value=value)), (1, 3, 5, 4), tiles=(5, 5), backward_tiles=(3, 4)
    )


def test_channels_too() -> None:
    """The shortcut of a ResNet without parameters: every other position, and empty channels."""
    assert_tiled(After(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 3), "constant", 0)), (2, 3, 9, 7))
    assert_tiled(After(lambda x: F.pad(x, (1, 2, 2, 0, 2, 3, 0, 1), value=0.5)), (2, 3, 9, 7))


@pytest.mark.parametrize(
    "module",
    [
        nn.ZeroPad2d(2),
        nn.ConstantPad2d((1, 3, 0, 2), 7.0),
        nn.ReflectionPad2d((3, 1, 2, 0)),
        nn.ReplicationPad2d(2),
        nn.CircularPad2d((3, 2, 1, 4)),
    ],
    ids=str,
)
def test_modules(module: nn.Module) -> None:
    assert_tiled(After(module), (2, 3, 6, 9))


@pytest.mark.parametrize("mode", ["zeros", *MODES[1:]])
@pytest.mark.parametrize(
    "kernel,padding,stride,dilation",
    [(3, 1, 1, 1), (5, 2, 2, 1), (3, 3, 1, 3), ((4, 2), "same", 1, 1), ((2, 5), "same", 1, 2)],
)
def test_convolutions(mode: str, kernel: Any, padding: Any, stride: int, dilation: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, kernel, stride, padding, dilation, padding_mode=mode),
        nn.GELU(),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode=mode),
    )
    assert_tiled(net, (2, 3, 11, 9), tiles=(4, 3), backward_tiles=(2, 5))


@pytest.mark.parametrize("size", [(11, 8), (7, 9)])
@pytest.mark.parametrize("kernel,stride", [(3, 2), (7, 2), (2, 3), (4, 2)])
def test_tensorflow_same(size: Any, kernel: int, stride: int) -> None:
    """Padding that depends on the size, more of it at the end."""

    def same(x: Tensor, w: Tensor) -> Tensor:
        pads = []
        for n in reversed(x.shape[2:]):
            total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
            pads += [total // 2, total - total // 2]
        x = F.conv2d(F.pad(x, pads), w, stride=stride)
        return F.max_pool2d(F.pad(x, pads, value=float("-inf")), kernel, 1)

    assert_tiled(After(same, w=(4, 4, kernel, kernel)), (2, 3, *size), tiles=(3, 4), backward_tiles=(2, 2))


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("ceil", [False, True])
def test_lp_pool(power: float, ceil: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid(), nn.LPPool2d(power, 3, 2, ceil_mode=ceil))
    assert_tiled(net, (2, 3, 12, 9))


def test_half_open_space() -> None:
    """A map whose other axis is not padded, and one with its channels last."""
    assert_tiled(After(lambda x: F.pad(x.permute(0, 2, 3, 1), (0, 0, 2, 1))), (2, 3, 5, 7))
    assert_tiled(After(lambda x: F.pad(x.permute(0, 2, 3, 1), (1, 2, 2, 1, 0, 3), value=2.0)), (2, 3, 5, 7))


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), pads=st.tuples(*[st.integers(-3, 8)] * 4),
    mode=st.sampled_from(MODES), tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any(size: Any, pads: Any, mode: str, tiles: Any) -> None:
    for n, (before, after) in zip(reversed(size), [pads[:2], pads[2:]], strict=True):
        assume(n + min(before, 0) + min(after, 0) >= 1)
        assume(mode != "reflect" or max(before, after) < n)
        assume(mode != "circular" or max(before, after) <= n + min(before, 0) + min(after, 0))
    assert_tiled(After(partial(F.pad, pad=pads, mode=mode)), (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])


def test_values_of_other_types() -> None:
    """Integers and masks are padded too."""
    from lightning_plugin import LazyImage, materialize

    x = torch.randint(-9, 9, (1, 2, 6, 5))
    lazy = LazyImage.from_tensor(x, engine=asked((2, 3)))
    assert torch.equal(materialize(F.pad(lazy, (1, 2, 3, -1), value=4)), F.pad(x, (1, 2, 3, -1), value=4))
    assert torch.equal(materialize(F.pad(lazy > 0, (1, 2), "constant", True)), F.pad(x > 0, (1, 2), "constant", True))
