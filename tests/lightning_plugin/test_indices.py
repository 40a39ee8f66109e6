"""Indices in every spelling: ``x[index]`` and ``x[index] = 7`` are plain PyTorch's, or an error where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lightning_plugin import LazyImage, materialize
from tests.exactness import TOLERANCE, asked, difference
from tests.lightning_plugin.drawn_indices import indices
from tests.lightning_plugin.rules.helpers import recorded_kinds

SHAPE = (2, 3, 6, 5)
ALL = slice(None)
TRUTHS = [True, False, True, True, False, True]

Way = Callable[[Tensor, Any], Tensor]


def picked(x: Tensor, index: Any) -> Tensor:
    return (x * x)[index]


def written(x: Tensor, index: Any) -> Tensor:
    y = x * x
    y[index] = 7.0
    return y * x


def step(way: Way, image: Callable[[Tensor], Tensor], index: Any) -> tuple[Tensor, Tensor]:
    """A result and the gradient of a weighted sum of it."""
    torch.manual_seed(0)
    pixels = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    out = way(image(pixels), index)
    if out.numel():
        (out * torch.randn(out.shape, dtype=out.dtype)).sum().backward()
    grad = torch.zeros(SHAPE, dtype=out.dtype) if pixels.grad is None else pixels.grad
    return materialize(out).detach(), grad


def tiled(pixels: Tensor) -> Tensor:
    return LazyImage.from_tensor(pixels, engine=asked((3, 2), (2, 3)))


def assert_as_pytorch(way: Way, index: Any) -> None:
    try:
        expected = step(way, lambda pixels: pixels, index)
    except Exception as refused:
        with pytest.raises(IndexError if isinstance(refused, IndexError) else Exception):
            step(way, tiled, index)
        return
    for a, e in zip(step(way, tiled, index), expected, strict=True):
        assert difference(a, e) < TOLERANCE


#: What is recorded as a number, a slice or a tensor of numbers is, and the index that is spelled so.
SPELLED: dict[str, tuple[Any, Any]] = {
    "truths": ((ALL, ALL, TRUTHS), (ALL, ALL, torch.tensor(TRUTHS))),
    "truths of images": ([True, False], torch.tensor([True, False])),
    "an array of truths": ((..., np.array(TRUTHS), ALL), (ALL, ALL, torch.tensor(TRUTHS))),
    "bytes": ((ALL, ALL, np.array(TRUTHS, dtype=np.uint8)), (ALL, ALL, torch.tensor(TRUTHS))),
    "tensors of truths": ((ALL, [torch.tensor(True), torch.tensor(False), True]), (ALL, [True, False, True])),
    "tensors in a list": ((ALL, ALL, [torch.tensor(1), torch.tensor([2]), 4]), (ALL, ALL, torch.tensor([1, 2, 4]))),
    "numbers of NumPy in a list": ((ALL, ALL, [np.int64(1), np.int32(2), 4]), (ALL, ALL, torch.tensor([1, 2, 4]))),
    "a range": ((ALL, ALL, range(1, 6, 2)), (ALL, ALL, torch.tensor([1, 3, 5]))),
    "a tensor": ((ALL, torch.tensor(1)), (ALL, 1)),
    "a tensor of an image": (torch.tensor(-1), -1),
    "a short tensor": ((..., torch.tensor(1, dtype=torch.int16)), (..., 1)),
    "an array": ((ALL, np.array(1)), (ALL, 1)),
    "a tensor beside numbers": ((ALL, torch.tensor(1), [0, 2, 5]), (ALL, 1, torch.tensor([0, 2, 5]))),
    "a list of tensors": ([torch.tensor(0), torch.tensor(2)], (0, 2)),
    "a true tensor": ((ALL, torch.tensor(True)), (ALL, True)),
    "a slice of tensors": ((ALL, ALL, slice(torch.tensor(1), torch.tensor(4))), (ALL, ALL, slice(1, 4))),
}


@pytest.mark.parametrize("name", list(SPELLED))
def test_spelled_otherwise_it_is_recorded_alike(name: str) -> None:
    index, other = SPELLED[name]
    assert_as_pytorch(picked, index)
    assert_as_pytorch(written, index)
    kinds = recorded_kinds(lambda x: picked(x, index), SHAPE)
    assert kinds and not kinds["Barrier"] and not kinds["Gather"] and not kinds["Uncut"], kinds
    assert kinds == recorded_kinds(lambda x: picked(x, other), SHAPE)


REFUSED: dict[str, Any] = {
    "masks of other counts": (ALL, ALL, torch.tensor(TRUTHS), torch.arange(5) < 2),
    "lists of other lengths": (ALL, [0, 1], [0, 1, 2]),
    "a mask and a list": (ALL, [0, 1, 1], torch.tensor(TRUTHS)),
    "nothing and a list": (False, [0, 1]),
    "fractions": (ALL, torch.tensor([1.0])),
    "a fraction": (ALL, torch.tensor(1.0)),
    "short numbers": (ALL, torch.tensor([1], dtype=torch.int16)),
    "too few truths": (ALL, ALL, TRUTHS[1:]),
    "truths behind an ellipsis, which counts them once": (..., torch.ones(6, 5).bool().tolist()),
    "beyond": (ALL, torch.tensor(3)),
    "beyond in a list": (ALL, [0, torch.tensor(-4)]),
    "too many": (*[torch.tensor(0)] * 5,),
    "too many with truths": (0, 0, [0], 0, np.array(True)),
    "two ellipses": (..., ..., [0, 1]),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    for way in (picked, written):
        with pytest.raises(IndexError):
            step(way, lambda pixels: pixels, REFUSED[name])
        with pytest.raises(IndexError):
            step(way, tiled, REFUSED[name])


@pytest.mark.parametrize("way", [picked, written])
@pytest.mark.parametrize("spelling", [lambda t: t, lambda t: [t, 0], lambda t: slice(t, t + 2)])
def test_a_number_that_is_computed_is_known_at_the_call(way: Way, spelling: Callable[[Tensor], Any]) -> None:
    assert_as_pytorch(lambda x, _: way(x, (ALL, spelling(x.detach().mean((0, 2, 3)).argmax()))), None)


@pytest.mark.parametrize(
    "index",
    [
        lambda: torch.tensor(1),
        lambda: torch.tensor([True, False, True]),
        lambda: [torch.tensor(0), torch.tensor(2)],
        lambda: [True, False, True],
        lambda: np.array([True, False, True]),
        lambda: np.array(1),
        lambda: slice(torch.tensor(1), None),
    ],
    ids=["tensor", "mask", "tensors in a list", "truths", "array of truths", "array", "slice"],
)
def test_an_index_counts_as_it_was_at_the_call(index: Callable[[], Any]) -> None:
    def changed(x: Tensor, index: Any) -> Tensor:
        out = picked(x, (ALL, index))
        change(index)
        return out * 2

    pixels = torch.randn(SHAPE, dtype=torch.float64)
    expected = changed(pixels, index())
    assert difference(materialize(changed(LazyImage.from_tensor(pixels), index())), expected) < TOLERANCE


def change(index: Any) -> None:
    """Write to all that an index is made of."""
    if isinstance(index, slice):
        index.start.fill_(2)
    elif isinstance(index, list):
        for part in index:
            change(part)
        index.reverse()
        index.pop()
    elif isinstance(index, Tensor):
        index.copy_(index.logical_not())
    elif isinstance(index, np.ndarray):
        index[...] = ~index if index.dtype == bool else 0


@given(indices(SHAPE))
def test_any_index_picks_what_pytorch_picks(index: Any) -> None:
    assert_as_pytorch(picked, index)


@given(indices(SHAPE))
def test_any_index_writes_where_pytorch_writes(index: Any) -> None:
    assert_as_pytorch(written, index)
