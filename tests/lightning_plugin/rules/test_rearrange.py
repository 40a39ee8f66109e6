"""Flips, rolls, rotations and repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.exactness import assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled

CASES: dict[str, Callable[[Tensor], Any]] = {
    "flip": lambda x: x.flip(2),
    "flip both": lambda x: x.flip(-1, -2) + x,
    "flip channels too": lambda x: torch.flip(x, (1, 3)),
    "averaged over flips": lambda x: (x + x.flip(2) + x.flip(3)).mean((2, 3)),
    "mirrored, then pooled": lambda x: F.max_pool2d(torch.fliplr(x.transpose(1, 3)).transpose(1, 3), 3, 2),
    "roll": lambda x: x.roll((2, -3), (2, 3)) * x,
    "roll by more than the size": lambda x: torch.roll(x, 25, 2),
    "roll by nothing": lambda x: torch.roll(x, (0, 7), (2, 3)),
    "roll channels too": lambda x: torch.roll(x, (1, 2), (1, 2)),
    "roll channels": lambda x: torch.roll(x, 1, 1),
    "shifted windows": lambda x: x.permute(0, 2, 3, 1).roll((-2, -2), (1, 2)).permute(0, 3, 1, 2),
    "quarter": lambda x: torch.rot90(x, 1, (2, 3)),
    "three quarters": lambda x: torch.rot90(x, -1, (2, 3)),
    "half": lambda x: torch.rot90(x, 2, (3, 2)),
    "full": lambda x: torch.rot90(x, 4, (2, 3)),
    "repeat": lambda x: x.repeat(1, 1, 2, 3),
    "repeat everything": lambda x: x.repeat(2, 2, 1, 2),
    "new dimension": lambda x: x.repeat(3, 1, 1, 1, 1).mean((3, 4)),
    "tile": lambda x: F.avg_pool2d(x.tile(2, 2), 3, 2, 1),
    "a row expanded": lambda x: x[:, :, 4:5].expand(-1, -1, 6, -1) * 2,
    "a row expanded, and images": lambda x: x[None, :, :, 4:5].expand(2, -1, -1, 6, -1).sum(0),
    "interleave": lambda x: F.max_pool2d(x.repeat_interleave(2, 2).repeat_interleave(3, 3), 4, 3),
}


@pytest.mark.parametrize(("name", "grids"), sampled(CASES, [((3, 2), (2, 3)), ((5, 7), (1, 1))], every=2))
def test_tiled(name: str, grids: Any) -> None:
    assert_tiled(After(CASES[name]), (2, 3, 11, 7), tiles=grids[0], backward_tiles=grids[1])


def test_1d_and_3d() -> None:
    assert_tiled(After(lambda x: x.flip(2).roll(3, 2), axes=1), (2, 3, 11), tiles=(4,), backward_tiles=(3,))
    net = After(lambda x: x.flip(2, 4).roll((1, 2), (3, 2)), axes=3)
    assert_tiled(net, (1, 3, 5, 4, 6), tiles=(2, 2, 3), backward_tiles=(3, 1, 1))


@pytest.mark.parametrize("function", [lambda x: x.flatten(2).flip(2), lambda x: x.roll(5)])
def test_positions_that_are_no_box(function: Callable[[Tensor], Any]) -> None:
    """A flip of flattened positions is one of the axis they are put together to; a roll of all numbers mixes channels
    too, and is run whole."""
    net = After(function)
    assert_exact(net, (2, 3, 6, 5))
    assert recorded_kinds(net, (1, 3, 6, 5))["Flatten" if "flip" in function.__code__.co_names else "Barrier"]


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), shifts=st.tuples(st.integers(-12, 12), st.integers(-12, 12)),
    flips=st.sets(st.integers(1, 3)), tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any(size: Any, shifts: Any, flips: Any, tiles: Any) -> None:
    net = After(lambda x: F.avg_pool2d(x.roll(shifts, (2, 3)).flip(tuple(flips)), 3, 1, 1))
    assert_tiled(net, (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])


@pytest.mark.parametrize("offset", [(), (0,)])
def test_strides_that_say_nothing_new(offset: tuple[int, ...]) -> None:
    def function(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return torch.as_strided(x, (n, c, h, w), (c * h * w, h * w, w, 1), *offset).square()

    assert_tiled(After(function), (2, 3, 9, 8))
