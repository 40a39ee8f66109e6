"""A slide with a large empty canvas, cut to what was scanned: pixels and positions stay those of the slide."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from wsi_trainer.slide import slide as slide_module
from wsi_trainer.slide.formats.base import Reader, ReadOptions
from wsi_trainer.slide.formats.opening import open_format
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.settings import Settings

BOUNDS = (133, 210, 500, 301)  # y, x, height, width of a slide of 1037 x 803


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int, int, int] | None], None]:
    """Has files say which part of them was scanned."""

    def say(bounds: tuple[int, int, int, int] | None) -> None:
        def opened(path: Path, reader: str | None, options: ReadOptions) -> Reader:
            found = open_format(path, reader, options)
            found.info = replace(found.info, bounds=bounds)
            return found

        monkeypatch.setattr(slide_module, "open_format", opened)

    say(BOUNDS)
    return say


@pytest.mark.usefixtures("bounded")
def test_every_level_is_a_part_of_the_slides(slide: Path) -> None:
    with Slide.open(slide) as whole, Slide.open(slide, crop=True) as cropped:
        y, x = cropped.origin
        assert y <= 133 and x <= 210 and 133 - y < 16 and 210 - x < 16
        assert cropped.shape == (133 + 500 - y, 210 + 301 - x)
        assert cropped.transform.origin == (y, x) and cropped.transform.shape == whole.shape
        assert len(cropped.levels) == len(whole.levels) == 3
        for number, level in enumerate(cropped.levels):
            step = int(level.downsample)
            expected = whole.read(number, y // step, x // step, level.height, level.width)
            assert np.array_equal(cropped.read(number, 0, 0, level.height, level.width), expected)
        with pickle.loads(pickle.dumps(cropped)) as again:
            assert np.array_equal(again.read(0, 5, 6, 70, 80), cropped.read(0, 5, 6, 70, 80))


def test_slides_without_bounds_or_without_margin_stay_as_they_are(
    slide: Path, bounded: Callable[[tuple[int, int, int, int] | None], None]
) -> None:
    for bounds in (None, (0, 0, 1037, 803), (0, 0, 0, 0)):
        bounded(bounds)
        with Slide.open(slide, crop=True) as opened:
            assert opened.origin == (0, 0) and opened.shape == (1037, 803)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("mpp", [None, 1.1])
def test_positions_are_kept(slide: Path, tmp_path: Path, mpp: float | None) -> None:
    settings = Settings(chunk=64, shard=256, crop="bounds", mpp=mpp, levels=2)
    done = convert(Job(slide, "s"), tmp_path, settings)
    attributes = json.loads((tmp_path / "s.zarr" / "zarr.json").read_text())["attributes"]
    with Slide.open(slide, crop=True) as cropped:
        y, x = cropped.origin
        assert attributes["wsi_trainer"]["source_origin"] == [y, x]
        assert attributes["wsi_trainer"]["settings"]["crop"] == "bounds"
        if mpp is None:
            assert (done.height, done.width) == cropped.info.shape
            pixels = zarr.open_array(tmp_path / "s.zarr" / "0", mode="r")[:]
            assert np.array_equal(np.moveaxis(pixels, 0, 2), cropped.read(0, 0, 0, *cropped.info.shape))
    label = json.loads((tmp_path / "s.zarr" / "labels" / "tissue" / "zarr.json").read_text())["attributes"]
    for ome in (attributes["ome"], label["ome"]):
        steps = [level["coordinateTransformations"] for level in ome["multiscales"][0]["datasets"]]
        size = steps[0][0]["scale"][-1]
        half = (size - 0.5) / 2  # the slide has 0.5 µm a pixel; micrometres are counted from the centre of the first
        assert steps[0][1]["translation"][-2:] == pytest.approx([y * 0.5 + half, x * 0.5 + half])
        assert steps[1][1]["translation"][-2:] == pytest.approx([y * 0.5 + half + size / 2, x * 0.5 + half + size / 2])


@pytest.mark.usefixtures("bounded")
def test_store_with_a_place_passes_the_validators(slide: Path, tmp_path: Path) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="extra validate is not installed")
    yaozarrs = pytest.importorskip("yaozarrs", reason="extra validate is not installed")
    convert(Job(slide, "s"), tmp_path, Settings(chunk=64, shard=256, crop="bounds"))
    models.open_ome_zarr(zarr.open_group(tmp_path / "s.zarr", mode="r"))
    yaozarrs.validate_zarr_store(str(tmp_path / "s.zarr"))


@pytest.mark.usefixtures("bounded")
def test_outline_lies_where_it_was_drawn(slide: Path, tmp_path: Path) -> None:
    ring = [[300, 200], [460, 200], [460, 360], [300, 360], [300, 200]]  # x, y in pixels of the slide
    (tmp_path / "slide.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    settings = Settings(chunk=64, shard=256, crop="bounds", tissue="geojson", geojson=tmp_path)
    convert(Job(slide, "s"), tmp_path / "out", settings)
    rows, columns = np.nonzero(zarr.open_array(tmp_path / "out" / "s.zarr" / "labels" / "tissue" / "0", mode="r")[:])
    with Slide.open(slide, crop=True) as cropped:
        y, x = cropped.origin
    assert abs(rows.min() + y - 200) <= 16 and abs(rows.max() + y - 360) <= 16
    assert abs(columns.min() + x - 300) <= 16 and abs(columns.max() + x - 460) <= 16


def test_stores_made_before_the_option_still_fit() -> None:
    assert "crop" not in Settings().record() and Settings(crop="bounds").record()["crop"] == "bounds"
