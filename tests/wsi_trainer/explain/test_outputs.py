"""Files of a map, read back."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr

from lightning_plugin import Box, TensorSource
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import index_of, targets_of
from wsi_trainer.explain.outputs import crop, peaks
from wsi_trainer.explain.slide_map import MapOptions
from wsi_trainer.models import BinaryTask, CoxTask, MultiClassTask, OrdinalTask
from wsi_trainer.regions.geojson import PathClass, objects_of, write_objects
from wsi_trainer.regions.ngff import write_map
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.shapes import mask_of, outlines
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.slide import Slide


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


def test_the_thumbnail_is_the_mean_of_the_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (100, 130, 3), np.uint8)
    tifffile.imwrite(tmp_path / "slide.tif", pixels, photometric="rgb")
    with Slide.open(tmp_path / "slide.tif") as slide:
        small = slide.thumbnail(64)
    assert small.shape == (34, 44, 3)
    np.testing.assert_array_equal(small[1, 2], pixels[3:6, 6:9].mean((0, 1)).round())
    np.testing.assert_array_equal(small[33, 43], pixels[99:, 129:].mean((0, 1)))


def test_targets_have_names() -> None:
    assert index_of(BinaryTask(["n", "t"]), None) == 1 and index_of(BinaryTask(["n", "t"]), "n") == 0
    assert index_of(OrdinalTask(["0", "1", "2"]), None) == 2 and index_of(MultiClassTask(["a", "b"]), None) == 0
    assert targets_of(CoxTask()) == ("risk",) and index_of(CoxTask(), None) == 0
    with pytest.raises(UserError, match="--target is 'x'; this model has a, b"):
        index_of(MultiClassTask(["a", "b"]), "x")


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", 1.5), ("steps", 0), ("top", -1), ("size", 0), ("tiles", -1), ("ngff", "0.6")]
)
def test_options_that_make_no_sense_are_named(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{key} is {value!r}"):
        MapOptions(**{key: value})  # type: ignore[arg-type]
