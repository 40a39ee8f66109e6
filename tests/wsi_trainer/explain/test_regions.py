"""Regions on the grid of a map, and the shares of a map in them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.attribution import Attribution
from wsi_trainer.explain.heatmaps import facts_of
from wsi_trainer.explain.outputs import draw_overlay, sentence_on_regions, shares_inside
from wsi_trainer.explain.slide_map import MapOptions, SlideMap
from wsi_trainer.regions.shapes import Rings, mask_of
from wsi_trainer.slide.geometry import SlideTransform


def square(x: float, y: float, side: float) -> list[tuple[float, float]]:
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]


def test_a_region_covers_the_positions_whose_centre_it_holds() -> None:
    mask = mask_of([[square(16, 32, 32)]], (12, 16), stride=8)
    expected = np.zeros((12, 16), dtype=bool)
    expected[4:8, 2:6] = True
    np.testing.assert_array_equal(mask, expected)
    outside = mask_of([[square(-100, -100, 50)], [square(1000, 0, 50)]], (12, 16), stride=8)
    assert not outside.any()


def test_holes_are_not_inside() -> None:
    regions: list[Rings] = [[square(0, 0, 160), square(40, 40, 80)]]
    mask = mask_of(regions, (20, 20), stride=8)
    assert mask[1, 1] and not mask[10, 10]


def test_the_margin_reaches_as_far_as_it_says() -> None:
    regions: list[Rings] = [[square(80, 80, 8)]]
    for position, inside in (((10, 13), 1), ((7, 10), 1), ((10, 15), 0), ((13, 13), 0)):
        values = torch.zeros(21, 21)
        values[position] = 2.0
        assert shares_inside(Attribution(values, 8), regions, margin=24).mass == inside


def test_a_map_without_aim_has_the_share_of_the_area() -> None:
    flat = Attribution(torch.ones(20, 30), 8)
    shares = shares_inside(flat, [[square(0, 0, 80)]], margin=0)
    assert shares.mass == pytest.approx(shares.area) and 0.1 < shares.area < 0.25


def test_a_map_that_aims_has_all_and_what_speaks_against_counts_as_nothing() -> None:
    values = torch.full((20, 30), -5.0)
    values[3:6, 3:6] = 2.0
    assert shares_inside(Attribution(values, 8), [[square(0, 0, 80)]], margin=0).mass == 1
    assert np.isnan(shares_inside(Attribution(-torch.ones(4, 4), 8), [[square(0, 0, 8)]], 0).mass)


def test_a_slide_on_which_nothing_speaks_for_the_class_does_not_spoil_the_mean(tmp_path: Path) -> None:
    record = SlideRecord("s", tmp_path, "tumour", "p", "test")
    maps = {name: SlideMap(tmp_path, record, (8, 8), SlideTransform((8, 8)), 8, name) for name in "ab"}
    nothing = {"a": {"mass_inside": float("nan"), "area_inside": 0.5}}
    assert sentence_on_regions(facts_of("tumour", MapOptions(), 9, nothing, {}, maps)) == ""
    both = nothing | {"b": {"mass_inside": 0.25, "area_inside": 0.1}}
    said = sentence_on_regions(facts_of("tumour", MapOptions(), 9, both, {}, maps))
    assert "25 % of the map's positive values for 'tumour'" in said and "mean over 1 slides" in said


def test_the_overlay_is_coloured_where_the_map_is_high_only() -> None:
    values = torch.zeros(10, 15)
    values[2, 3] = 4.0
    picture = np.full((80, 120, 3), 200, dtype=np.uint8)
    overlay = np.asarray(draw_overlay(picture, Attribution(values, 16), (160, 240), scale=4.0))
    assert overlay.shape == picture.shape
    coloured = (overlay.max(axis=2).astype(int) - overlay.min(axis=2)) > 20
    rows, columns = np.nonzero(coloured)
    assert rows.min() >= 14 and rows.max() <= 25 and columns.min() >= 22 and columns.max() <= 33
    faint = np.asarray(draw_overlay(picture, Attribution(values, 16), (160, 240), scale=4000.0))
    assert np.abs(faint.astype(int) - faint.mean()).max() < 25


def test_outlines_are_drawn_where_the_regions_are() -> None:
    picture = np.full((80, 120, 3), 200, dtype=np.uint8)
    flat = Attribution(torch.zeros(10, 15), 16)
    with_outline = np.asarray(draw_overlay(picture, flat, (160, 240), 1.0, [[square(40, 40, 80)]]))
    green = with_outline[..., 1] > with_outline[..., 0].astype(int) + 40
    rows, columns = np.nonzero(green)
    assert {rows.min() // 2, columns.min() // 2} <= {9, 10} and 59 <= rows.max() <= 62
