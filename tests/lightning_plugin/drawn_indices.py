"""Random indices: mixtures of all that an index may hold, in all spellings, a few of which no tensor has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

#: Parts that lie on no dimension.
BETWEEN = st.sampled_from([None, True, False, torch.tensor(True), torch.tensor(False), torch.tensor(1).byte()])


def positions(size: int) -> st.SearchStrategy[int]:
    """Numbers of positions, one of them beyond."""
    return st.integers(-size, size - 1) | st.integers(-size, size)


def lengths(size: int) -> st.SearchStrategy[int]:
    """The length of a dimension, now and then another."""
    return st.sampled_from([size] * 7 + [size + 1])


def slices(size: int) -> st.SearchStrategy[slice]:
    end = st.none() | st.integers(-size - 1, size + 1)
    return st.builds(slice, end, end | end.map(maybe_tensor), st.none() | st.integers(1, 3))


def maybe_tensor(number: int | None) -> Any:
    return None if number is None else torch.tensor(number)


def as_tensors(numbers: list[Any]) -> list[Any]:
    """A list of which every other number is a tensor, or a list of such lists."""
    return [as_tensors(n) if isinstance(n, list) else torch.tensor(n) if i % 2 else n for i, n in enumerate(numbers)]


SPELLINGS: Sequence[Callable[[list[Any]], Any]] = (
    list,
    tuple,
    as_tensors,
    lambda numbers: np.array(numbers, dtype=bool if holds_truths(numbers) else int),
    lambda numbers: torch.tensor(numbers, dtype=torch.bool if holds_truths(numbers) else torch.int64),
)


def holds_truths(numbers: list[Any]) -> bool:
    first = numbers[0] if numbers else None
    return holds_truths(first) if isinstance(first, list) else isinstance(first, bool)


def spelled(lists: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[Any]:
    return st.builds(lambda numbers, spelling: spelling(numbers), lists, st.sampled_from(SPELLINGS))


def lists(of: st.SearchStrategy[Any], length: st.SearchStrategy[int]) -> st.SearchStrategy[list[Any]]:
    return length.flatmap(lambda n: st.lists(of, min_size=n, max_size=n))


def single(size: int) -> st.SearchStrategy[Any]:
    """Parts that lie on one dimension, of a size."""
    number = positions(size)
    few = st.integers(0, 3)
    nested = st.integers(1, 2).flatmap(lambda n: st.lists(lists(number, st.just(n)), min_size=1, max_size=2))
    return st.one_of(
        st.just(slice(None)),
        slices(size),
        number,
        number.map(torch.tensor),
        number.map(np.int64),
        number.map(np.array),
        spelled(lists(number, few)),
        spelled(nested),
        spelled(lists(st.booleans(), lengths(size))),
        spelled(lists(number | st.booleans(), st.just(2))),
    )


def masks(shape: Sequence[int]) -> st.SearchStrategy[Any]:
    """Masks of two dimensions."""
    rows, columns = map(lengths, shape)
    return columns.flatmap(lambda n: lists(st.lists(st.booleans(), min_size=n, max_size=n), rows))


@st.composite
def indices(draw: st.DrawFn, shape: Sequence[int]) -> Any:
    """An index of a tensor of a shape, now and then of more dimensions than it has."""
    parts: list[Any] = []
    dim = 0
    size = [*shape, 2]
    ellipsis = draw(st.booleans())
    first = draw(st.integers(0, len(shape)))
    several = SPELLINGS[-1:] if ellipsis else SPELLINGS
    most = len(shape) + 1
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["one"] * 4 + ["two", "between"]))
        if kind == "two" and dim + 1 < len(shape):
            parts.append(draw(st.sampled_from(several))(draw(masks(size[dim : dim + 2]))))
            dim += 2
            # PyTorch counts a list of lists once, and would look for the sizes of dimensions that there are not.
            most = most if isinstance(parts[-1], torch.Tensor) else len(shape)
        elif kind == "between":
            parts.append(draw(BETWEEN))
        elif dim < most:
            parts.append(draw(single(size[dim])))
            dim += 1
    if ellipsis:
        parts.insert(min(first, len(parts)), Ellipsis)
    how = draw(st.sampled_from([tuple] * 8 + [list]))
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else how(parts)
