"""Regions cut tile by tile: against shapely's geometry, and against themselves cut otherwise."""

from pathlib import Path

import numpy as np
import pytest
import shapely
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin import Box, TileSource
from wsi_trainer.regions.outlines import Region
from wsi_trainer.regions.target import IGNORED, DrawnSource, Legend
from wsi_trainer.slide.augment import Augmented, Augmenter
from wsi_trainer.slide.geometry import SlideTransform

SIZE = (37, 53)
numbers = st.floats(-20, 80, allow_nan=False, width=32) | st.integers(-5, 60).map(lambda n: n + 0.5)
corners = st.lists(st.tuples(numbers, numbers), min_size=3, max_size=12)


def source(*rings: list[tuple[float, float]], place: SlideTransform | None = None) -> DrawnSource:
    regions = [Region("b", tuple(np.array(ring, float) for ring in rings))]
    return DrawnSource.of(regions, Legend.of(["a", "b"], None, None), place or SlideTransform(SIZE), SIZE, Path("x"))


def whole(drawn: TileSource) -> np.ndarray:
    return drawn.read(Box.whole(drawn.shape[2:]))[0, 0].numpy()


def centres() -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    return x + 0.5, y + 0.5


@given(corners)
def test_holds_the_pixels_whose_centre_lies_in_the_polygon(ring: list[tuple[float, float]]) -> None:
    # What crosses itself is in by the odd number of crossings: that is what shapely's lines leave of it.
    polygon = shapely.Polygon(ring)
    if not polygon.is_valid:
        polygon = shapely.make_valid(polygon, method="linework")
    x, y = centres()
    expected = shapely.contains_xy(polygon, x, y)
    near = shapely.distance(shapely.LineString([*ring, ring[0]]), shapely.points(x, y)) < 1e-6
    found = whole(source(ring)) == 1
    assert (found == expected)[~near].all()


@given(corners, corners, st.integers(1, 36), st.integers(1, 52))
def test_a_tile_is_cut_out_of_the_whole(
    first: list[tuple[float, float]], second: list[tuple[float, float]], row: int, column: int
) -> None:
    drawn = source(first, second)
    expected = torch.from_numpy(whole(drawn))[None, None]
    for top, bottom in ((0, row), (row, SIZE[0])):
        for left, right in ((0, column), (column, SIZE[1])):
            box = Box((top, left), (bottom, right))
            part = expected[..., top:bottom, left:right]
            assert torch.equal(drawn.read(box), part)
            known = drawn.constant(box)
            assert known is None or (part == known).all()


def test_what_is_painted_later_lies_on_top() -> None:
    square = [(0.0, 0.0), (20.0, 0.0), (20.0, 20.0), (0.0, 20.0)]
    small = [(5.0, 5.0), (10.0, 5.0), (10.0, 10.0), (5.0, 10.0)]
    regions = [
        Region(name, (np.array(ring),))
        for name, ring in (("_2", small), ("_0", square), ("seen", [(p[0] * 2, p[1] * 1.5) for p in square]))
    ]
    legend = Legend.of(["normal", "tumour"], {"seen": "normal", "_0": "tumour", "_2": "normal"}, "ignore")
    values = whole(DrawnSource.of(regions, legend, SlideTransform(SIZE), SIZE, Path("x")))
    assert values[7, 7] == 0 and values[2, 2] == 1 and values[25, 25] == 0 and values[35, 50] == IGNORED
    assert (values == 1).sum() == 400 - 25


@pytest.mark.parametrize("scale", [(4.0, 4.0), (2.0, 3.0)])
def test_a_shrunk_image_has_the_pixels_whose_centre_is_drawn(scale: tuple[float, float]) -> None:
    ring = [(31.0, 22.0), (170.0, 40.0), (120.0, 130.0), (40.0, 101.0)]
    found = whole(source(ring, place=SlideTransform(SIZE, (7.0, 11.0), scale))) == 1
    x, y = centres()
    expected = shapely.contains_xy(shapely.Polygon(ring), x * scale[1] + 11, y * scale[0] + 7)
    assert expected.any() and (found == expected).all()


@given(st.integers(0, 50))
def test_is_turned_and_shifted_as_the_slide_is(epoch: int) -> None:
    drawn = source([(3.0, 4.0), (33.0, 9.0), (20.0, 35.0)])
    how = Augmenter(seed=1, shift=9).draw("slide", epoch)
    shown = Augmented(drawn, how)
    values = torch.from_numpy(whole(drawn)).long()
    moved = torch.full(SIZE, IGNORED)
    down, right = how.shift
    for y in range(SIZE[0]):
        for x in range(SIZE[1]):
            if 0 <= y - down < SIZE[0] and 0 <= x - right < SIZE[1]:
                moved[y, x] = values[y - down, x - right]
    axes = [axis for axis, flip in ((0, how.flip_y), (1, how.flip_x)) if flip]
    moved = moved.flip(axes).T if how.transpose else moved.flip(axes)
    assert torch.equal(torch.from_numpy(whole(shown)).long(), moved)
