"""Combinations of parameters: a sample in CI, all of them with `--full`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def sampled(*values: Iterable[Any], every: int) -> list[Any]:
    """Make the parameters of all combinations of some lists, of which each ``every``-th runs in CI.

    Where the longest list has so many values, each value of the others runs in combination with some of its.
    """
    found = []
    for combination in itertools.product(*map(enumerate, values)):
        marks = [pytest.mark.full] if sum(place for place, _ in combination) % every else []
        values_of = [value for _, value in combination]
        found.append(pytest.param(*values_of, marks=marks, id="-".join(map(name_of, values_of))))
    return found


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", None) or getattr(value, "name", value))
