"""Places: positions there and back, in metadata, and of stores that were written before places were kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin import Box
from wsi_trainer.data.dataset import TissueMap
from wsi_trainer.errors import SlideError
from wsi_trainer.explain.outputs import side_of_tiles, tiles, with_tissue
from wsi_trainer.preprocess.stores import Originals
from wsi_trainer.slide.geometry import Resolution, SlideTransform, place_of_store
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Job, Settings, convert

from .scn import write_scn

SIZES = st.integers(1, 300_000)
SCALES = st.floats(0.5, 128)
PLACES = st.builds(
    SlideTransform,
    shape=st.tuples(SIZES, SIZES),
    origin=st.tuples(st.floats(0, 200_000), st.floats(0, 200_000)),
    scale=st.tuples(SCALES, SCALES),
    mpp=st.none() | st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
    bounds=st.none() | st.tuples(SIZES, SIZES, SIZES, SIZES),
)


@given(PLACES, st.lists(st.tuples(st.floats(0, 100_000), st.floats(0, 100_000)), min_size=1))
def test_positions_come_back(place: SlideTransform, points: list[tuple[float, float]]) -> None:
    there = place.to_slide(points)
    np.testing.assert_allclose(place.to_image(there), points, atol=1e-6)
    for (x, y), (left, top) in zip(points, there.tolist()):
        assert left == pytest.approx(place.origin[1] + x * place.scale[1])
        assert top == pytest.approx(place.origin[0] + y * place.scale[0])
    assert SlideTransform.of(json.loads(json.dumps(place.record()))) == place


def test_what_is_no_place_is_refused() -> None:
    for wrong in ({"scale": [0, 1]}, {"scale": [1]}, {"shape": ["a", "b"]}, {"origin": [float("nan"), 0]}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            SlideTransform.of({"shape": [1, 1], "origin": [0, 0], "scale": [1, 1], **wrong})


@pytest.fixture(scope="module")
def scn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scn") / "slide.scn"
    pixels = np.random.default_rng(1).integers(0, 256, (32, 40, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    write_scn(path, pixels, (203, 301), (1200, 1500))
    return path


@pytest.mark.parametrize("crop", ["none", "bounds"])
@pytest.mark.parametrize("mpp", [None, 0.73, 1.0, 1.37, 2.0001])
def test_a_store_says_where_in_its_slide_it_lies(scn: Path, tmp_path: Path, crop: str, mpp: float | None) -> None:
    settings = Settings(chunk=64, shard=256, crop=crop, mpp=mpp, tissue="none", levels=2)  # type: ignore[arg-type]
    convert(Job(scn, "s"), tmp_path, settings)
    store = tmp_path / "s.zarr"
    place = place_of_store(store)
    assert place.shape == (1200, 1500) and place.bounds == (203, 301, 512, 640) and place.mpp == (0.5, 0.5)
    assert place.origin == ((200.0, 300.0) if crop == "bounds" else (0.0, 0.0))  # a whole pixel of the level of 4
    assert Image(Slide.open(store), factor=2).place == place.coarser(2)


def test_a_level_that_is_taken_as_it_is_has_its_own_scale(scn: Path, tmp_path: Path) -> None:
    convert(Job(scn, "s"), tmp_path, Settings(chunk=64, shard=256, mpp=2.0001, tissue="none"))
    source = Image(Slide.open(tmp_path / "s.zarr"))
    assert source.place.scale == (4.0, 4.0) and source.resolution == Resolution(2.0, 2.0, "store")  # 2.0001 would drift


def test_damaged_metadata_is_named(scn: Path, tmp_path: Path) -> None:
    convert(Job(scn, "s"), tmp_path, Settings(chunk=64, shard=256, tissue="none"))
    store = tmp_path / "s.zarr"
    content = json.loads((store / "zarr.json").read_text())
    content["attributes"]["wsi_trainer"]["place"]["scale"] = [1, "?"]
    (store / "zarr.json").write_text(json.dumps(content))
    with pytest.raises(SlideError, match="where in the slide the store lies"):
        place_of_store(store)


def test_originals_are_found_by_their_content(scn: Path, tmp_path: Path) -> None:
    convert(Job(scn, "another name"), tmp_path, Settings(chunk=64, shard=256, tissue="none"))
    store = tmp_path / "another name.zarr"
    assert Originals(scn.parent).of(store) == scn
    assert Originals().of(store) is None and Originals().of(scn) == scn


# -- which positions of a map become tiles


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_tissue_is_that_of_its_pixels(height: int, width: int, stride: int, scale: int, seed: int) -> None:
    coarse = tuple(max(1, round(side / scale)) for side in (height, width))  # as short as masks may be
    mask = TissueMask(np.random.default_rng(seed).random(coarse) < 0.1, scale)
    pixels = TissueMap(mask, (height, width), stride)
    expected = pixels.read(Box((0, 0), pixels.shape[2:]))[0, 0].numpy() > 0
    found = with_tissue(mask, stride, (expected.shape[0], expected.shape[1]), (height, width))
    np.testing.assert_array_equal(found, expected)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 400), st.integers(0, 99))
def test_every_position_with_tissue_is_in_one_tile(rows: int, columns: int, most: int, seed: int) -> None:
    lot = np.random.default_rng(seed)
    values, wanted = lot.normal(size=(rows, columns)), lot.random((rows, columns)) < 0.3
    size = (rows * 8 - 3, columns * 8 - 5)
    covered = np.zeros((rows, columns), dtype=int)
    found = list(tiles(values, 8, size, wanted, most))
    side = side_of_tiles(wanted, most)
    assert len(found) <= most or not wanted.any()
    for one in found:
        (left, top), (right, bottom) = one.rings[0][0], one.rings[0][2]
        assert right <= size[1] and bottom <= size[0]
        part = (slice(int(top) // 8, int(top) // 8 + side), slice(int(left) // 8, int(left) // 8 + side))
        covered[part] += 1
        inside = values[part][wanted[part]]
        assert one.measurements["largest value"] == inside.max()
        np.testing.assert_allclose(one.measurements["mean value"], inside.mean())
    assert (covered[wanted] == 1).all()
