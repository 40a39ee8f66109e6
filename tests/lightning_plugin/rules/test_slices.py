"""Crops, strided slices, single rows and pieces of space, and maps put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import LazyImage, materialize
from tests.exactness import assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled


def space_to_depth(x: Tensor) -> Tensor:
    """The stem of YOLOv5."""
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def centre_crop(x: Tensor) -> Tensor:
    """The skip connection of a U-Net whose convolutions do not pad."""
    inner = F.avg_pool2d(x[:, :, 1:-1, 1:-1], 3, 1)
    top, left = ((a - b) // 2 for a, b in zip(x.shape[2:], inner.shape[2:], strict=True))
    return torch.cat([inner, x[:, :, top : top + inner.shape[2], left : left + inner.shape[3]]], 1)


def total_variation(x: Tensor) -> Tensor:
    return x.diff(dim=2)[..., 1:].abs() + (x[:, :, 1:] - x[:, :, :-1])[..., :-1] ** 2


CASES: dict[str, Callable[[Tensor], Any]] = {
    "crop": lambda x: x[:, :, 2:-3, 1:5],
    "far crop": lambda x: x[:, :, 9:, -1:],
    "whole": lambda x: x[:, :, :, :] * x[...],
    "strided": lambda x: x[:, 1:3, 1::3, ::2],
    "stride beyond": lambda x: x[:, :, ::20, 3::20],
    "narrow": lambda x: x.narrow(2, 3, 4).narrow(-1, 0, 2),
    "every other, twice": lambda x: F.conv2d(x[:, :, ::2][:, :, ::2], torch.ones(2, 4, 3, 3, dtype=x.dtype), padding=1),
    "space to depth": lambda x: space_to_depth(x[:, :, :10, :6]),
    "centre crop": centre_crop,
    "differences": total_variation,
    "split": lambda x: [p * (i + 1) for i, p in enumerate(x.split(4, 2))],
    "split with sizes": lambda x: x.split([1, 2, 4], -1)[1],
    "chunk": lambda x: x.chunk(3, 3),
    "select": lambda x: x[:, :, 4],
    "select last": lambda x: x[..., -1].relu(),
    "select both": lambda x: x[:, :, 4, 3].square(),
    "unbind": lambda x: sum((r * (i + 1) for i, r in enumerate(x.unbind(3))), x[..., 0]),
    "first of a sequence": lambda x: x.flatten(2)[:, :, 9] * x.flatten(2).transpose(1, 2)[:, -1],
    "channels last": lambda x: x.permute(0, 2, 3, 1)[:, 1::2, 2:, :2],
    "merged patches": lambda x: torch.cat(
        [x.permute(0, 2, 3, 1)[:, a:10:2, b:6:2] for a in (0, 1) for b in (0, 1)], -1
    ),
    "tiles side by side": lambda x: torch.cat([x[:, :, :3], x[:, :, 5:], x], 2),
    "both axes": lambda x: torch.cat([torch.cat([x, x.relu()], 3), torch.cat([x.tanh(), x], 3)], 2),
    "a constant beside": lambda x: torch.cat([x.new_zeros(2, 4, 11, 2), x, x.new_ones(2, 4, 11, 1)], 3),
}


@pytest.mark.parametrize(("name", "grids"), sampled(CASES, [((3, 2), (2, 3)), ((5, 7), (1, 1))], every=2))
def test_tiled(name: str, grids: Any) -> None:
    net = After(CASES[name])
    assert_exact(net, (2, 3, 11, 7), tiles=grids[0], backward_tiles=grids[1])
    kinds = recorded_kinds(net, (2, 3, 11, 7))
    assert not kinds["Barrier"] and not kinds["Uncut"] and not kinds["Flatten"], kinds


NUMBERS = [9, 0, 3, 3, -2, 5, 1]
PICKED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "rows": lambda x, numbers: x[:, :, numbers],
    "columns": lambda x, numbers: x[..., numbers],
    "images": lambda x, numbers: x[numbers],
    "channels": lambda x, numbers: x[:, numbers].square(),
    "rows of an image": lambda x, numbers: x[0, :, numbers].relu(),
}


SPELLINGS = [(name, spelling) for name in PICKED for spelling in (list, tuple, np.array, torch.tensor)]
SPELLINGS.remove(("images", tuple))  # that is an index for each dimension


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_picked_by_numbers_in_any_spelling(name: str, spelling: Callable[[list[int]], Any]) -> None:
    """A list of numbers picks what a tensor of them does: nothing is run whole or made uncut for it."""
    numbers = NUMBERS if name in ("rows", "columns") else [n % 4 for n in NUMBERS]
    shape = (4, 3, 11, 10)
    pick = PICKED[name]
    assert_exact(After(lambda x: pick(x, spelling(numbers))), shape)
    kinds = recorded_kinds(After(lambda x: pick(x, spelling(numbers))).double(), shape)
    assert not kinds["Barrier"] and not kinds["Gather"] and not kinds["Uncut"], kinds
    assert kinds == recorded_kinds(After(lambda x: pick(x, torch.tensor(numbers))).double(), shape)


def test_a_list_of_numbers_counts_as_it_was_at_the_call() -> None:
    numbers = [4, 2, 0, 5]

    def picked(x: Tensor) -> Tensor:
        out = x[:, :, numbers]
        numbers.reverse()
        return out

    pixels = torch.randn(1, 3, 9, 8, dtype=torch.float64)
    assert materialize(picked(LazyImage(pixels))).equal(pixels[:, :, [4, 2, 0, 5]])


def test_parameter_beside() -> None:
    """A learned border beside a map gets its gradient."""
    net = After(lambda x, w: torch.cat([w, x], 2), w=(2, 4, 3, 7))
    assert_tiled(net, (2, 3, 11, 7))


@pytest.mark.parametrize("axes", [1, 3])
def test_1d_and_3d(axes: int) -> None:
    shape, tiles = (1, 3, 9, 5, 6)[: 2 + axes], (4, 2, 3)[:axes]
    assert_tiled(
        After(lambda x: x[:, :, 1:-1:2] * x[:, :, 2:9:2], axes=axes), shape, tiles=tiles, backward_tiles=tiles[::-1]
    )
    assert_tiled(
        After(lambda x: torch.cat([x[:, :, 5:], x], 2), axes=axes), shape, tiles=tiles, backward_tiles=tiles[::-1]
    )


@pytest.mark.parametrize(
    "together",
    [
        lambda x: torch.stack([x, x.transpose(2, 3)]),
        lambda x: torch.stack([x, x.relu()], 2),
        lambda x: torch.stack([x, x.new_ones(x.shape)], 1),
        lambda x: torch.cat([x, x.transpose(2, 3)], 1),
        lambda x: torch.cat([x, x.transpose(2, 3)], 2),
        lambda x: x + x.transpose(2, 3),
    ],
    ids=["stack", "stack alike", "stack with a constant", "channels", "rows", "sum"],
)
def test_maps_that_lie_otherwise_meet(together: Callable[[Tensor], Tensor]) -> None:
    """Of the same shape, and with rows where the other has columns."""
    for images in (1, 2):
        assert_exact(After(together), (images, 3, 6, 6), tiles=(3, 2), backward_tiles=(2, 3))


def test_one_number_of_all_is_exact() -> None:
    assert_exact(After(lambda x: x * x[0, 0].flatten()[9]), (2, 3, 11, 7))


def test_flattened_crop_is_exact() -> None:
    """A part of all positions is no box of rows and columns: they are put together to one axis."""
    net = After(lambda x: x.flatten(2)[:, :, 5:20])
    assert_exact(net, (2, 3, 6, 5))
    kinds = recorded_kinds(net, (2, 3, 6, 5))
    assert kinds["Flatten"] and not kinds["Barrier"]


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    data=st.data(),
    tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_any(size: Any, data: st.DataObject, tiles: Any) -> None:
    cuts = []
    for n in size:
        start = data.draw(st.integers(-n, n - 1))
        stop = data.draw(st.one_of(st.none(), st.integers(start % n + 1, n + 3)))
        cuts.append(slice(start, stop, data.draw(st.integers(1, 5))))
    net = After(lambda x: F.avg_pool2d(x[:, :, cuts[0], cuts[1]], 1) + 1)
    assert_tiled(net, (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])


def grid_of(x: Tensor, size: tuple[int, int], step: tuple[int, int], first: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Crops of one size at regular places, row by row."""
    rows = range(first[0], x.shape[-2] - size[0] + 1, step[0])
    columns = range(first[1], x.shape[-1] - size[1] + 1, step[1])
    return [x[..., a : a + size[0], b : b + size[1]] for a in rows for b in columns]


REGULAR: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat(grid_of(x, (4, 3), (4, 3))),
    "stack": lambda x: torch.stack(grid_of(x[0], (4, 4), (2, 3))),
    "stack of images": lambda x: torch.stack(grid_of(x, (5, 4), (5, 4))),
    "cat with a margin": lambda x: torch.cat(grid_of(x, (3, 3), (3, 4), (2, 1))),
    "rows": lambda x: torch.cat([x[:, :, a : a + 3] for a in range(0, 12, 3)]),
}
IRREGULAR: dict[str, Callable[[Tensor], Tensor]] = {
    "another order": lambda x: torch.cat(grid_of(x, (4, 3), (4, 3))[::-1]),
    "one left out": lambda x: torch.cat(grid_of(x, (4, 3), (4, 3))[:-1]),
    "uneven": lambda x: torch.cat([x[:, :, a : a + 3] for a in (0, 3, 7)]),
    "two maps": lambda x: torch.cat([x[:, :, :4], x[:, :, 4:8] * 2]),
    "one twice": lambda x: torch.cat([x[:, :, :4], x[:, :, :4], x[:, :, 4:8]]),
}


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("name", [*REGULAR, *IRREGULAR])
def test_patches_that_a_loop_cuts_out(name: str, images: int) -> None:
    """Regular ones of one image are recorded as `unfold`, whatever loop has cut them; others are exact."""
    function = {**REGULAR, **IRREGULAR}[name]
    assert_exact(After(function), (images, 3, 13, 12), tiles=(3, 2, 2), backward_tiles=(2, 3))
    kinds = recorded_kinds(After(function).double(), (images, 3, 13, 12))
    assert bool(kinds["Unfold"]) == (name in REGULAR and (images == 1 or "stack" in name))
    assert not kinds["Barrier"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :0, 0],
        lambda x: x[:, :0].flatten(2),
        lambda x: x[:, :0, None],
        lambda x: x[:, []].permute(0, 2, 1, 3)[0],
        lambda x: x[:, :0].unsqueeze(1).flatten(1, 2),
    ],
)
def test_views_of_no_channels_are_what_they_are_in_pytorch(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    assert materialize(view(LazyImage.from_tensor(x))).shape == view(x).shape


def mask_of(*shape: int) -> Tensor:
    """Two of three positions."""
    return torch.ones(shape).cumsum(-1) % 3 != 1


INDICES: dict[str, Any] = {
    "rows": (slice(None), slice(None), mask_of(8)),
    "columns after an ellipsis": (..., mask_of(9)),
    "rows before an ellipsis": (0, 1, mask_of(8), ...),
    "both": (slice(None), slice(None), mask_of(8, 9)),
    "after a new dimension": (None, slice(None), slice(None), mask_of(8)),
    "images": mask_of(2),
    "after a list of truths": (mask_of(2, 3).tolist(), torch.arange(8) < 4),
    "after a list of truths and a slice": (mask_of(2, 3).tolist(), slice(None), torch.arange(9) < 4),
    "after an array of truths": (mask_of(2, 3).numpy(), slice(None), torch.arange(9) < 4),
    "after a mask and a slice": (mask_of(2, 3), slice(None), torch.arange(9) < 4),
    "after a list of numbers": (slice(None), [0, 2], torch.arange(8) > 5),
    "too short after a list of truths": (mask_of(2, 3).tolist(), mask_of(5)),
    "too short": (slice(None), slice(None), mask_of(5)),
    "too long": (..., mask_of(10)),
    "another shape": (slice(None), slice(None), mask_of(9, 8)),
    "too short for images": mask_of(1),
    "more dimensions than there are": (..., mask_of(8, 9, 2)),
}


@pytest.mark.parametrize("name", list(INDICES))
def test_a_mask_picks_what_pytorch_picks_or_is_refused_as_there(name: str) -> None:
    torch.manual_seed(0)
    index = INDICES[name]
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    try:
        expected = x[index].square().sum()
    except IndexError:
        with pytest.raises(IndexError, match="mask"):
            LazyImage.from_tensor(x)[index]
        return
    assert abs(float(LazyImage.from_tensor(x)[index].square().sum()) - float(expected)) < 1e-9
