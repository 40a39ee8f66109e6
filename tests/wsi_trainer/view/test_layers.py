"""Layers: means, ranks, places and outlines against what is counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wsi_trainer.view.conftest import DOWNSAMPLE, STRIDE, Made
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.tiles import LAYER_TILE, BadNumber, Layer, NotThere, means

SQUARE = STRIDE * DOWNSAMPLE


@given(rows=st.integers(1, 20), columns=st.integers(1, 20), side=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99))
def test_means_are_over_what_is_there(rows: int, columns: int, side: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    found = means(values, side)
    assert found.shape == (-(-rows // side), -(-columns // side))
    for (row, column), value in np.ndenumerate(found):
        square = values[row * side : (row + 1) * side, column * side : (column + 1) * side]
        assert value == pytest.approx(float(np.mean(square, dtype=np.float64)), rel=1e-5, abs=1e-6)


def test_tiles_of_numbers_make_up_each_level() -> None:
    values = np.random.default_rng(0).normal(size=(3 * LAYER_TILE + 5, LAYER_TILE + 1)).astype(np.float32)
    layer = Layer(values, 4.0)
    assert layer.levels == 3
    for level in range(layer.levels):
        rows, columns = (-(-size // (LAYER_TILE * 2**level)) for size in values.shape)
        lines = [np.concatenate([layer.tile(level, row, c) for c in range(columns)], 1) for row in range(rows)]
        np.testing.assert_allclose(np.concatenate(lines, 0), means(values, 2**level), rtol=1e-6)
    for level, row, column in ((3, 0, 0), (0, 4, 0), (0, 0, 2), (-1, 0, 0)):
        with pytest.raises(NotThere):
            layer.tile(level, row, column)


def test_value_and_rank_at_a_place(scene: Scene, made: Made) -> None:
    values = made.maps[0]
    for row, column in ((0, 0), (5, 7), (values.shape[0] - 1, values.shape[1] - 1)):
        found = scene.at(0, "0", column * SQUARE + 3, row * SQUARE + SQUARE - 1)
        assert found["value"] == pytest.approx(float(values[row, column]))
        ordered = np.sort(values, axis=None)[::-1].tolist()
        assert found["rank"] == ordered.index(float(values[row, column])) + 1
        assert found["of"] == values.size
        assert found["box"] == [column * SQUARE, row * SQUARE, SQUARE, SQUARE]
    with pytest.raises(NotThere):
        scene.at(0, "0", -1, 0)


def test_top_places_are_where_the_largest_values_are(scene: Scene, made: Made) -> None:
    places = scene.top(0, "0", 3)["places"]
    row, column = np.unravel_index(made.maps[0].argmax(), made.maps[0].shape)
    assert places[0] == {
        "x": (column + 0.5) * SQUARE, "y": (row + 0.5) * SQUARE, "value": pytest.approx(float(made.maps[0].max())),
    }  # fmt: skip
    for place in places:
        assert scene.at(0, "0", place["x"], place["y"])["value"] == pytest.approx(place["value"])
    with pytest.raises(BadNumber):
        scene.top(0, "0", 0)


def test_an_outline_surrounds_what_is_above_the_threshold(scene: Scene, made: Made) -> None:
    polygons = scene.outlines(0, "0", 0.9)["polygons"]
    values = made.maps[0]
    for polygon in polygons:
        points = np.array(polygon["rings"][0])
        assert (points >= 0).all() and (points <= [1100, 700]).all()
    row, column = np.unravel_index(values.argmax(), values.shape)
    centre = np.array([column + 0.5, row + 0.5]) * SQUARE
    distances = [np.abs(np.array(one["rings"][0]) - centre).max() for one in polygons]
    assert min(distances) < SQUARE  # one goes round the largest value and no further than its neighbours
    for bad in (0.0, 1.0, -1.0):
        with pytest.raises(BadNumber):
            scene.outlines(0, "0", bad)


def test_the_tissue_is_found_where_it_was_painted(scene: Scene, made: Made) -> None:
    layer = scene.layer(0, "tissue")
    painted = np.abs(made.pixels[0].astype(int).max(2) - made.pixels[0].min(2)) > 30
    side = int(layer.stride)
    for y in range(side // 2, 700, side):
        for x in range(side // 2, 1100, side):
            row, column = layer.position(x, y)
            if not painted[max(0, y - 6 * side) : y + 6 * side, max(0, x - 6 * side) : x + 6 * side].any():
                assert not layer.values[row, column]
    middle = layer.position(550, 350)
    assert layer.values[middle]


def test_a_layer_that_is_not_there_is_named(scene: Scene) -> None:
    for name in ("1", "²", "-1", "tissues", "../0"):
        with pytest.raises(NotThere, match="has no layer"):
            scene.layer(0, name)
