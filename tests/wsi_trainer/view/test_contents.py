"""The list of slides of a run, of two, and of slides alone."""

from __future__ import annotations

import gc
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.wsi_trainer.view.conftest import POSITIVE, Made
from wsi_trainer.errors import UserError
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene


def test_the_worst_mistake_is_first(made: Made) -> None:
    shown = contents_of(made.folder.path, regions=made.regions)
    errors = [slide.opinions[0].error for slide in shown.slides if slide.opinions[0]]
    assert errors == pytest.approx(sorted((0.9, 0.2, 0.3, 0.6), reverse=True))
    first = shown.slides[0]
    assert (first.name, first.label, first.opinions[0].predicted) == ("slide 0 <&>.tif", "a", "b")  # type: ignore[union-attr]
    assert first.opinions[0].wrong and first.opinions[0].probability == pytest.approx(POSITIVE[0])  # type: ignore[union-attr]
    assert first.regions is not None and first.maps[0].title == "activation, b"
    assert (first.maps[0].stride, first.maps[0].place.scale) == (8, (2.0, 2.0))
    assert "probability" in shown.error_means


def test_two_runs_are_told_apart(made_twice: tuple[Made, Made]) -> None:
    first, second = made_twice
    shown = contents_of(first.folder.path, second.folder.path)
    assert shown.runs == ("first", "second")
    slide = shown.slides[0]
    assert [one.error for one in slide.opinions if one] == pytest.approx([0.9, 0.1])
    assert [one.title for one in slide.maps] == ["first: activation, b", "second: activation, b"]


def test_slides_without_a_prediction_come_last(made_twice: tuple[Made, Made]) -> None:
    made = made_twice[0]
    path = made.folder.predictions_file("test")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[2]]))
    shown = contents_of(made.folder.path)
    assert [slide.opinions[0] is None for slide in shown.slides] == [False, True, True, True]
    shutil.rmtree(path.parent)
    shutil.rmtree(made.folder.maps("activation"))
    shown = contents_of(made.folder.path)
    assert len(shown.slides) == 4 and not any(slide.maps for slide in shown.slides) and shown.error_means == ""


def test_slides_alone(made: Made, tmp_path: Path) -> None:
    slides = made.folder.path.parent / "slides"
    assert [slide.name for slide in contents_of(slides).slides] == [f"slide {k} <&>" for k in range(4)]
    assert len(contents_of(slides / "slide 1 <&>.tif").slides) == 1
    listed = contents_of(made.folder.splits)
    assert [slide.label for slide in listed.slides] == ["a", "b", "a", "b"] and not listed.runs


def test_a_cross_validation_names_its_folds(tmp_path: Path) -> None:
    (tmp_path / "cross_validation.json").write_text("{}")
    with pytest.raises(UserError, match="fold0"):
        contents_of(tmp_path)


def test_annotations_of_the_original_lie_right_on_its_store(made: Made, tmp_path: Path) -> None:
    """Half as fine as its slide, a store shows what was drawn on the slide at half the position."""
    slide = made.folder.path.parent / "slides" / "slide 0 <&>.tif"
    assert preprocess(str(slide), tmp_path / "stores", mpp=1.0, workers=1) == 0
    (store,) = (tmp_path / "stores").glob("*.zarr")
    regions = tmp_path / "regions"
    regions.mkdir()
    (drawn,) = made.regions.glob("*.geojson")
    shutil.copy(drawn, regions / f"{store.stem}.geojson")
    scene = Scene(contents_of(store, regions=regions))
    try:
        (polygon,) = scene.regions(0)["polygons"]
        assert polygon["rings"] == [[[5.0, 5.0], [25.0, 5.0], [25.0, 20.0], [5.0, 5.0]]]
        place = scene.about(0)["place"]
        assert (place["scale"], place["origin"]) == ((2.0, 2.0), (0.0, 0.0))
    finally:
        scene.close()


@pytest.mark.parametrize(("name", "shown"), [("slide 0 <&>.tif", 0.25), ("slide 0 <&>.zarr", 1.0)])
def test_a_store_has_pixels_of_its_own_size_whatever_the_table_says_of_its_slide(
    name: str, shown: float, made: Made, tmp_path: Path
) -> None:
    slide = made.folder.path.parent / "slides" / "slide 0 <&>.tif"
    assert preprocess(str(slide), tmp_path / "stores", mpp=1.0, workers=1) == 0
    path = slide if name.endswith(".tif") else tmp_path / "stores" / name
    (tmp_path / "m.csv").write_text(f"slide,mpp\n{path},0.25\n")
    scene = Scene(contents_of(tmp_path / "m.csv"))
    try:
        assert scene.about(0)["mpp"] == [shown, shown]
    finally:
        scene.close()


# -- many tiles of many slides leave nothing behind


@pytest.mark.slow
def test_threads_read_slides_that_others_close_and_none_stays_open(tmp_path: Path) -> None:
    generate(tmp_path, slides=4, side=400, seed=0, workers=1)
    scene = Scene(contents_of(tmp_path / "slides"), keep_open=1)
    expected = [scene.region(slide, 40, 50, 60, 70) for slide in range(4)]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            slide = chance.randrange(4)
            assert scene.region(slide, 40, 50, 60, 70) == expected[slide]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    gc.collect()
    assert open_files(tmp_path) == scene.opened == 1
    scene.close()
    assert open_files(tmp_path) == scene.opened == 0


def open_files(folder: Path) -> int:
    return len({file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))})
