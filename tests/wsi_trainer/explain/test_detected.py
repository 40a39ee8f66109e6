"""Lesions that a map points at, against a judge that looks at every position."""

from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.heatmaps import is_known, marks_of
from wsi_trainer.metrics import MISSED
from wsi_trainer.regions.shapes import Rings, outlines

STRIDE = 8
SHAPE = (12, 15)


def square(row: int, column: int) -> list[tuple[float, float]]:
    """A region within one position, which no other position meets."""
    x, y = column * STRIDE + 2.0, row * STRIDE + 2.0
    return [(x, y), (x + 4, y), (x + 4, y + 4), (x, y + 4), (x, y)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 14)), max_size=5, unique=True), st.integers(0, 10**6))
def test_an_outline_detects_what_its_largest_value_meets(drawn: list[tuple[int, int]], seed: int) -> None:
    # Islands two positions apart, so that what hangs together is the same for any judge.
    random = np.random.default_rng(seed)
    values = np.zeros(SHAPE)
    for row in range(0, SHAPE[0], 4):
        for column in range(0, SHAPE[1], 5):
            values[row : row + 2, column : column + 2] = 1 + random.random((2, 2))
    regions: list[Rings] = [[square(*at)] for at in drawn]
    marks = marks_of(outlines(values, STRIDE, (96, 120), 0.25), regions, STRIDE)
    numbered, count = scipy.ndimage.label(values)
    hits, false = dict.fromkeys(drawn, MISSED), []
    for number in range(1, count + 1):
        at = np.unravel_index(np.where(numbered == number, values, 0).argmax(), SHAPE)
        place = int(at[0]), int(at[1])
        if place in hits:
            hits[place] = max(hits[place], values[at])
        else:
            false.append(values[at])
    assert sorted(marks.lesions.tolist()) == sorted(hits.values())
    assert sorted(marks.false.tolist()) == sorted(false)


def test_regions_that_overlap_are_one_lesion() -> None:
    values = np.zeros(SHAPE)
    values[3, 4] = 1
    hole: Rings = [square(3, 4), [(x / 4 + 34.5, y / 4 + 26.5) for x, y in square(0, 0)]]
    marks = marks_of(outlines(values, STRIDE, (96, 120), 0.5), [hole, [square(3, 4)], [square(0, 0)]], STRIDE)
    assert sorted(marks.lesions) == [MISSED, 1] and not len(marks.false)


@pytest.mark.parametrize(
    ("label", "regions", "known"),
    [("tumour", 1, True), ("tumour", 0, False), ("normal", 0, True), ("", 0, False), ("", 1, True)],
)
def test_lesions_are_known_where_they_are_drawn_or_there_are_none(label: str, regions: int, known: bool) -> None:
    record = SlideRecord("s", Path("s"), label, "p", "test")
    assert is_known(record, [[square(1, 1)]] * regions, "tumour", ("normal", "tumour")) == known
