"""Adaptive pooling to any size: as a map, and as a vector where the result is small against its bins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled

GRIDS = [((3, 2), (2, 3)), ((5, 7), (1, 1))]
POOLS = [F.adaptive_avg_pool2d, F.adaptive_max_pool2d]
SIZES = [(5, 6), (7, 7), (2, 3), (1, 4), (3, None), (1, 1), (23, 30), (11, 13), (10, 1), 4]


@pytest.mark.parametrize(("pool", "size", "grids"), sampled(POOLS, SIZES, GRIDS, every=2))
def test_2d(pool: Any, size: Any, grids: Any) -> None:
    tiles, backward = grids
    assert_tiled(After(lambda x: pool(x, size)), (2, 3, 11, 13), tiles=tiles, backward_tiles=backward)


@pytest.mark.parametrize("size", [1, 2, 4, 9, 20])
def test_1d_and_3d(size: int) -> None:
    how: Any = {"tiles": (3,), "backward_tiles": (4,)}
    assert_tiled(After(lambda x: F.adaptive_avg_pool1d(x, size), axes=1), (2, 3, 9), **how)
    assert_tiled(After(lambda x: F.adaptive_max_pool1d(x, size), axes=1), (2, 3, 9), **how)
    how = {"tiles": (3, 2, 1), "backward_tiles": (1, 2, 3)}
    assert_tiled(After(lambda x: F.adaptive_avg_pool3d(x, (size, 2, 3)), axes=3), (1, 3, 9, 5, 6), **how)
    assert_tiled(After(lambda x: F.adaptive_max_pool3d(x, (2, size, 3)), axes=3), (1, 3, 5, 9, 6), **how)


@pytest.mark.parametrize("pool", POOLS)
def test_kinds(pool: Any) -> None:
    """A small result is reduced to a vector, so that no tile has to hold a bin; a larger one is a map."""
    small = recorded_kinds(After(lambda x: pool(x, 3)).double(), (1, 3, 64, 48))
    large = recorded_kinds(After(lambda x: pool(x, 32)).double(), (1, 3, 64, 48))
    assert small["Binned"] == 1
    assert large["Resample"] + large["AdaptiveMax"] >= 1


def test_classifier() -> None:
    """As in VGG: seven by seven, flattened, then linear layers."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(4 * 49, 5),
        nn.ReLU(), nn.Linear(5, 2),
    )  # fmt: skip
    assert_exact(net, (2, 3, 53, 61))
    assert_exact(net, (2, 3, 5, 9))


@pytest.mark.parametrize("size", [(2, 3), (5, 6)])
def test_ties_and_indices(size: Any) -> None:
    """The first of equal values takes the gradient, and its flat index is PyTorch's. Integers add up exactly in any
    order."""
    x = torch.randint(0, 3, (2, 4, 11, 13)).double().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    lazy = LazyImage.from_tensor(twin, engine=asked((4, 3), (3, 5)))
    plain, where = F.adaptive_max_pool2d(x * 2, size, return_indices=True)
    tiled, found = F.adaptive_max_pool2d(lazy * 2, size, return_indices=True)
    assert torch.equal(materialize(found), where)
    weight = torch.randint_like(plain, -9, 10)
    (plain * weight).sum().backward()
    (tiled * weight).sum().backward()
    assert twin.grad is not None
    torch.testing.assert_close(twin.grad, x.grad, rtol=0, atol=0)


def test_several_levels() -> None:
    """Pyramid pooling: the same map at several sizes, flattened into one vector."""

    def pyramid(x: Tensor) -> Tensor:
        return torch.cat([F.adaptive_max_pool2d(x, n).flatten(1) for n in (1, 2, 4)], 1)

    assert_exact(After(pyramid), (2, 3, 23, 29))


@given(
    size=st.tuples(st.integers(1, 14), st.integers(1, 14)), out=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    pool=st.sampled_from(POOLS), tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any(size: Any, out: Any, pool: Any, tiles: Any) -> None:
    assert_tiled(After(partial(pool, output_size=out)), (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])


def test_the_maximum_of_all_positions_is_a_reduction() -> None:
    net = After(lambda x: F.adaptive_max_pool2d(x, 1))
    assert_tiled(net, (2, 3, 12, 8))
    assert recorded_kinds(net, (1, 3, 12, 8))["FirstExtreme"] == 1
