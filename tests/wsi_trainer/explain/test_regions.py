"""Regions on the grid of a map, and the shares of a map in them."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_plugin import Box, TensorSource
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import Attribution, index_of, label_of, score, targets_of
from wsi_trainer.explain.heatmaps import is_known, marks_of, shares_of
from wsi_trainer.explain.outputs import crop, peaks, sentence_on_regions, shares_inside
from wsi_trainer.explain.slide_map import MapOptions
from wsi_trainer.metrics import MISSED
from wsi_trainer.models import BinaryTask, CoxTask, MultiClassTask, MultiTargetTask, OrdinalTask
from wsi_trainer.regions.geojson import PathClass, objects_of, write_objects
from wsi_trainer.regions.ngff import write_map
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.shapes import Rings, mask_of, outlines
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


def test_the_margin_reaches_as_far_as_it_says() -> None:
    regions: list[Rings] = [[square(80, 80, 8)]]
    for position, inside in (((10, 13), 1), ((7, 10), 1), ((10, 15), 0), ((13, 13), 0)):
        values = torch.zeros(21, 21)
        values[position] = 2.0
        assert shares_inside(Attribution(values, 8), regions, margin=24).mass == inside


def test_a_map_that_aims_has_all_and_what_speaks_against_counts_as_nothing() -> None:
    values = torch.full((20, 30), -5.0)
    values[3:6, 3:6] = 2.0
    assert shares_inside(Attribution(values, 8), [[square(0, 0, 80)]], margin=0).mass == 1
    assert np.isnan(shares_inside(Attribution(-torch.ones(4, 4), 8), [[square(0, 0, 8)]], 0).mass)


def test_a_slide_on_which_nothing_speaks_for_the_class_does_not_spoil_the_mean() -> None:
    nothing = {"mass_inside": float("nan"), "area_inside": 0.5}
    facts = {"class": "tumour", "method": "activation", "receptive_field": 9}
    assert sentence_on_regions(facts | shares_of([nothing])) == ""
    said = sentence_on_regions(facts | shares_of([nothing, {"mass_inside": 0.25, "area_inside": 0.1}]))
    assert "25 % of the map's positive values for 'tumour'" in said and "mean over 1 slides" in said


# -- lesions that a map points at, against a judge that looks at every position


STRIDE = 8
SHAPE = (12, 15)


def within_a_position(row: int, column: int) -> list[tuple[float, float]]:
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
    regions: list[Rings] = [[within_a_position(*at)] for at in drawn]
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
    hole: Rings = [within_a_position(3, 4), [(x / 4 + 34.5, y / 4 + 26.5) for x, y in within_a_position(0, 0)]]
    marks = marks_of(
        outlines(values, STRIDE, (96, 120), 0.5), [hole, [within_a_position(3, 4)], [within_a_position(0, 0)]], STRIDE
    )
    assert sorted(marks.lesions) == [MISSED, 1] and not len(marks.false)


@pytest.mark.parametrize(
    ("label", "regions", "known"),
    [("tumour", 1, True), ("tumour", 0, False), ("normal", 0, True), ("", 0, False), ("", 1, True)],
)
def test_lesions_are_known_where_they_are_drawn_or_there_are_none(label: str, regions: int, known: bool) -> None:
    record = SlideRecord("s", Path("s"), label, "p", "test")
    assert is_known(record, [[within_a_position(1, 1)]] * regions, "tumour", ("normal", "tumour")) == known


# -- files of a map, read back


def test_the_layer_is_ngff_and_lies_over_the_slide(tmp_path: Path) -> None:
    models = pytest.importorskip("ome_zarr_models")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for mpp in ((0.5, 0.25), None):
        path = tmp_path / "slide.ome.zarr"
        write_map(path, values, SlideTransform((24, 32), mpp=mpp).coarser(8), {"method": "gradient"})
        models.open_ome_zarr(zarr.open_group(path, mode="r"))
        np.testing.assert_array_equal(zarr.open_array(path / "0", mode="r")[:], values)
    write_map(path, values, SlideTransform((24, 32), mpp=(0.5, 0.25)).coarser(8), {"method": "gradient"})
    attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    scale, shift = attributes["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert scale["scale"] == [4.0, 2.0] and shift["translation"] == [0.5 * 3.5, 0.25 * 3.5]
    assert attributes["wsi_trainer"]["method"] == "gradient"


def apply(transform: dict[str, Any], point: np.ndarray) -> np.ndarray:
    """A transform of NGFF 0.6 of a point."""
    if transform["type"] == "sequence":
        for step in transform["transformations"]:
            point = apply(step, point)
        return point
    key = transform["type"]
    return point * transform[key] if key == "scale" else point + transform[key]


@pytest.mark.parametrize("mpp", [(0.5, 0.25), None])
def test_transforms_of_ngff_0_6_lead_to_the_pixels_of_the_slide(
    tmp_path: Path, mpp: tuple[float, float] | None
) -> None:
    values, path = np.arange(12, dtype=np.float32).reshape(3, 4), tmp_path / "slide.ome.zarr"
    place = SlideTransform((48, 64), origin=(6, 2), scale=(1.5, 1.5), mpp=mpp).coarser(8)
    write_map(path, values, place, {"method": "gradient"}, "0.6")
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["0"][:], values)
    ome: Any = group.attrs["ome"]
    (image,) = ome["multiscales"]
    (first,), (second,) = (one["coordinateTransformations"] for one in (image["datasets"][0], image))
    assert (ome["version"], first["input"], first["output"]) == ("0.6", {"path": "0"}, second["input"])
    physical = apply(first, np.array([2.0, 1.0]))
    np.testing.assert_allclose(physical, np.array(place.first()) + np.array(place.pixel()) * [2, 1])
    np.testing.assert_allclose(apply(second, physical)[::-1], place.to_slide([[1.5, 2.5]])[0])
    if find_spec("ome_zarr_models") and find_spec("ome_zarr_models.v06"):  # of 1.8, which needs Python 3.12
        import_module("ome_zarr_models.v06").Image.from_zarr(group)


def test_outlines_enclose_what_is_above_the_threshold(tmp_path: Path) -> None:
    values = np.zeros((20, 30))
    values[3:9, 4:12] = 4.0
    values[5:7, 7:9] = 0.0  # a hole
    values[18:, 27:] = 3.0  # at the corner of the slide
    values[14, 2] = 1.0  # below the threshold
    values[14, 20] = -9.0
    found = outlines(values, 8, (160, 238), 0.5)
    assert [len(one.rings) for one in found] == [2, 1]
    assert [one.largest for one in found] == [4.0, 3.0]
    assert sum(one.share for one in found) == pytest.approx(1 - 1 / values.clip(0).sum())
    path = tmp_path / "slide.geojson"
    objects = objects_of(found, PathClass.of("tumour", 1))
    assert write_objects(path, objects, SlideTransform((320, 476), scale=(2.0, 2.0)), "a seed") == 2
    regions = [region.rings for region in read_regions(path)]
    np.testing.assert_array_equal(mask_of(regions, values.shape, 16), values >= 2)
    assert max(x for outline, *_ in regions for x, _ in outline) == 476
    features = json.loads(path.read_text())["features"]
    assert features[0]["properties"]["classification"]["name"] == "tumour"
    assert features[0]["properties"]["measurements"]["largest value"] == 4.0
    for feature in features:
        assert all(ring[0] == ring[-1] for ring in feature["geometry"]["coordinates"]), "a ring has to be closed"


def test_a_map_that_speaks_against_has_no_outlines_and_no_top() -> None:
    assert outlines(-np.ones((4, 4)), 8, (32, 32), 0.5) == []
    assert peaks(-np.ones((4, 4)), 8, (32, 32), 16, 3) == []


def test_the_top_regions_do_not_repeat_each_other_and_stay_inside() -> None:
    values = np.zeros((16, 16))
    values[0, 0], values[0, 1], values[10, 12], values[13, 15] = 5, 4, 3, 2
    found = peaks(values, 8, (128, 125), 32, 5)
    assert [one.value for one in found] == [5, 3]  # the others lie within a side of these
    assert (found[0].lo, found[0].hi, found[1].lo, found[1].hi) == ((0, 0), (32, 32), (68, 84), (100, 116))
    pixels = torch.arange(3 * 128 * 125).view(1, 3, 128, 125).to(torch.uint8)
    picture = np.asarray(crop(TensorSource(pixels), Box(found[1].lo, found[1].hi)))
    np.testing.assert_array_equal(picture, pixels[0, :, 68:100, 84:116].permute(1, 2, 0).numpy())
    assert peaks(values, 8, (20, 125), 32, 1)[0].hi == (20, 32)  # a slide smaller than a region


def test_targets_have_names() -> None:
    assert index_of(BinaryTask(["n", "t"]), None) == 1 and index_of(BinaryTask(["n", "t"]), "n") == 0
    assert index_of(OrdinalTask(["0", "1", "2"]), None) == 2 and index_of(MultiClassTask(["a", "b"]), None) == 0
    assert targets_of(CoxTask()) == ("risk",) and index_of(CoxTask(), None) == 0
    with pytest.raises(UserError, match="--target is 'x'; this model has a, b"):
        index_of(MultiClassTask(["a", "b"]), "x")


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", 1.5), ("steps", 0), ("top", -1), ("size", 0), ("tiles", -1), ("ngff", "0.7")]
)
def test_options_that_make_no_sense_are_named(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{key} is {value!r}"):
        MapOptions(**{key: value})  # type: ignore[arg-type]


def test_maps_of_several_targets_name_those_behind_the_first() -> None:
    task = MultiTargetTask({"tumour": BinaryTask(), "grade": MultiClassTask("123", column="grade"), "risk": CoxTask()})
    assert targets_of(task) == ("0", "1", "grade 1", "grade 2", "grade 3", "risk risk")
    assert index_of(task, None) == 1 and index_of(task, "grade 3") == 4
    logits = torch.tensor([[0.5, 1.0, 2.0, 3.0, 4.0]])
    assert [float(score(task, logits, place)) for place in range(6)] == [-0.5, 0.5, 1.0, 2.0, 3.0, 4.0]
    cells = {"label": "1", "grade": "2"}
    assert label_of(task, 1, cells) == "1" and label_of(task, 3, cells) == "grade 2"
