"""Pixel and channel shuffles, and views that cut axes into blocks or join them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin.layout import Axis, Layout
from tests.lightning_plugin.rules.helpers import After, assert_tiled
from tests.sampling import sampled

SHAPE = (2, 3, 12, 8)


def space_to_depth(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 4, 4).permute(0, 3, 5, 1, 2, 4).reshape(n, c * 8, h // 2, w // 4)


def depth_to_space(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, h * 2, w * 2)


def windows(x: Tensor, size: int) -> Tensor:
    n, h, w, c = x.shape
    return x.view(n, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


def unwindows(x: Tensor, size: int, shape: Any) -> Tensor:
    n, h, w, c = shape
    return x.view(n, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)


def window_attention(x: Tensor) -> Tensor:
    """As in a Swin transformer: attention within windows of four by four, shifted by two, around a shortcut."""
    x = x.permute(0, 2, 3, 1)
    bags = windows(x.roll((-2, -2), (1, 2)), 4)
    weights = (bags @ bags.transpose(1, 2)).softmax(-1)
    return (x + unwindows(weights @ bags, 4, x.shape).roll((2, 2), (1, 2))).permute(0, 3, 1, 2)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 4),
    "there and back": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "shufflenet": lambda x: x.view(2, 2, 2, 12, 8).transpose(1, 2).reshape(2, 4, 12, 8),
    "space to depth": space_to_depth,
    "depth to space": lambda x: F.avg_pool2d(depth_to_space(x), 3, 2, 1),
    "blocks of blocks": lambda x: x.view(2, 4, 3, 2, 2, 8).mean(3),
    "pooled by a view": lambda x: x.reshape(2, 4, 6, 2, 4, 2).amax((3, 5)),
    "repeated by a view": lambda x: F.conv2d(
        x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 3).reshape(2, 4, 24, 24),
        torch.ones(1, 4, 3, 3, dtype=x.dtype),
    ),
    "window attention": window_attention,
    "patch tokens": lambda x: x.view(2, 4, 3, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).square(),
}


@pytest.mark.parametrize(("name", "grids"), sampled(CASES, [((3, 2), (2, 3)), ((5, 7), (1, 1))], every=2))
def test_tiled(name: str, grids: Any) -> None:
    assert_tiled(After(CASES[name]), SHAPE, tiles=grids[0], backward_tiles=grids[1])


@pytest.mark.parametrize("name", ["space to depth", "depth to space", "window attention"])
def test_one_image(name: str) -> None:
    """A dimension of one image stays a dimension of its own."""
    assert_tiled(After(CASES[name]), (1, *SHAPE[1:]))
    assert_tiled(After(lambda x: x.view(1, 4, 1, 6, 2, 8).mean(4)), (1, 3, 12, 8))


#: What slides over plain dimensions, for windows of one, two and three.
SLIDING: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "convolution": (2, lambda x: F.conv2d(x, torch.ones(3, 4, 3, 2, dtype=x.dtype), padding=1)),
    "columns": (2, lambda x: F.unfold(x, 3)),
    "group norm": (2, lambda x: F.group_norm(x, 2)),
    "group norm of one channel": (2, lambda x: F.group_norm(x[:, :1], 1)),
    "group norm without its module": (2, lambda x: torch.group_norm(x, 2)),
    "layer norm without its module": (2, lambda x: torch.layer_norm(x, x.shape[2:])),
    "instance norm without its module": (2, lambda x: torch.instance_norm(x, *[None] * 4, True, 0.1, 1e-5, True)),
    "channel shuffle": (2, lambda x: F.channel_shuffle(x, 2)),
    "pixel shuffle": (2, lambda x: F.pixel_shuffle(x, 2)),
    "pixel unshuffle": (2, lambda x: F.pixel_unshuffle(x, 2)),
    "bicubic": (2, lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "antialiased": (2, lambda x: F.interpolate(x, size=(3, 5), mode="bilinear", antialias=True)),
}
for n, linear in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
    SLIDING |= {
        f"reflect {n}d": (n, partial(F.pad, pad=(1, 1) * n, mode="reflect")),
        f"replicate {n}d": (n, partial(F.pad, pad=(1, 2) * n, mode="replicate")),
        f"average {n}d": (n, partial(getattr(F, f"avg_pool{n}d"), kernel_size=2)),
        f"maximum {n}d": (n, partial(getattr(F, f"max_pool{n}d"), kernel_size=2)),
        f"nearest {n}d": (n, partial(F.interpolate, scale_factor=2)),
        f"exact nearest {n}d": (n, partial(F.interpolate, scale_factor=2, mode="nearest-exact")),
        f"linear {n}d": (n, partial(F.interpolate, scale_factor=2, mode=linear)),
    }


@pytest.mark.parametrize("name", SLIDING)
def test_what_slides_within_windows_carries_them(name: str) -> None:
    axes, slide = SLIDING[name]

    def inside(x: Tensor) -> Tensor:
        bags = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 4, 4, 4)
        return slide(
            bags.flatten(2) if axes == 1 else bags.unsqueeze(2).expand(-1, -1, 4, -1, -1) if axes == 3 else bags
        )

    assert_tiled(After(inside), (1, *SHAPE[1:]))


def test_operators_on_few_windows() -> None:
    """The dimension of windows is an axis, also where there are two by two."""

    def inside(x: Tensor) -> Tensor:
        bags = x.unfold(2, 6, 6).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 4, 6, 4)
        return F.avg_pool2d(F.pad(bags, (1, 1, 1, 1), mode="reflect"), 3, 2)

    assert_tiled(After(inside), (1, *SHAPE[1:]))


def test_1d() -> None:
    assert_tiled(After(lambda x: x.view(2, 4, 5, 3).sum(3), axes=1), (2, 3, 15), tiles=(4,), backward_tiles=(3,))


def test_cut_and_join_are_inverse() -> None:
    layout = Layout.channels_first((2, 4, 12, 8))
    blocks: dict[int, int] = {}
    found = layout.regroup((2, 4, 3, 4, 4, 2), blocks)
    assert found == Layout(((Axis(2),), (4,), (Axis(0),), (4,), (Axis(1),), (2,)), (3, 4, 2))
    assert blocks == {0: 4, 1: 2}
    assert layout.regroup((2, 4, 3, 4, 4, 2)) is None
    assert layout.regroup((2, 4, 5, 4), {}) is None
    assert layout.regroup((8, 8, 12), {}) is None


@given(
    size=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    block=st.integers(1, 3),
    tiles=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_any(size: Any, block: int, tiles: Any) -> None:
    """Down and up again, by shuffles and by views."""
    h, w = size

    def function(x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        down = F.pixel_unshuffle(x, block)
        view = x.view(n, c, h, block, w, block).permute(0, 1, 3, 5, 2, 4).reshape(n, c * block * block, h, w)
        return F.pixel_shuffle(down * view, block) + x

    assert_tiled(After(function), (2, 3, h * block, w * block), tiles=tiles, backward_tiles=tiles[::-1])
