"""Places: positions there and back, in metadata, and of stores that were written before places were kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_trainer.errors import SlideError
from wsi_trainer.preprocess.stores import Originals
from wsi_trainer.slide.geometry import SlideTransform, place_of_store
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.settings import Settings

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


@given(PLACES, st.integers(1, 64), st.integers(0, 4000))
def test_a_map_covers_what_its_positions_stand_for(place: SlideTransform, stride: int, at: int) -> None:
    here, there = place.coarser(stride).to_slide([[at, at]]), place.to_slide([[at * stride, at * stride]])
    np.testing.assert_allclose(here, there, rtol=1e-12)


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
    assert source.place.scale == (4.0, 4.0) and source.mpp == (2.0, 2.0)  # 2.0001 would drift


def test_a_slide_and_a_foreign_store_are_their_own_place(scn: Path) -> None:
    place = Image(Slide.open(scn), mpp=1.0).place
    assert place == SlideTransform((1200, 1500), (0.0, 0.0), (2.0, 2.0), (0.5, 0.5), (203, 301, 512, 640))


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
    assert Originals.in_folder(scn.parent).of(store) == scn
    assert Originals().of(store) is None and Originals().of(scn) == scn
