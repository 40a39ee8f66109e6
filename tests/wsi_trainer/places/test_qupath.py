"""The script for QuPath, run by Groovy with stand-ins for QuPath's classes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.outputs import write_script
from wsi_trainer.explain.slide_map import MapOptions, SlideMap
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.settings import Settings

from .qupath import write_stubs
from .scn import write_scn

STRIDE = 16


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run's maps, of one slide that was cropped and shrunk. Its name has what a script must quote."""
    folder = tmp_path_factory.mktemp("run") / "it's $a map"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(80, 255, (512, 640, 3), np.uint8)
    write_scn(folder.parent / "slide.scn", pixels, (203, 301), (1200, 1500))
    convert(
        Job(folder.parent / "slide.scn", "slide"), folder.parent, Settings(chunk=64, shard=256, crop="bounds", mpp=0.73)
    )
    source = Image(Slide.open(folder.parent / "slide.zarr"))
    size = (source.shape[2], source.shape[3])
    values = torch.zeros(-(-size[0] // STRIDE), -(-size[1] // STRIDE))
    values[4, 6], values[9, 2] = 4.0, 1.0
    record = SlideRecord("slide.zarr", source.slide.path, "", "", "")
    one = SlideMap(folder, record, size, source.place, STRIDE, Path(record.slide).stem)
    entry = one.write(values, source, MapOptions(top=0), PathClass.of("tumour", 1)).entry
    write(folder, entry | {"original": str(folder.parent / "slide.scn")})
    write_script(folder)
    return folder


def write(folder: Path, entry: dict[str, Any]) -> None:
    (folder / "heatmaps.json").write_text(json.dumps({"slides": {"slide.zarr": entry}}))


def run(maps: Path, tmp_path: Path, **wanted: Any) -> tuple[dict[str, Any], str]:
    groovy = shutil.which("groovy")
    if groovy is None:
        pytest.skip("Groovy is not installed")
    (tmp_path / "wanted.json").write_text(json.dumps({"images": [], "shown": None, **wanted}))
    stubs = write_stubs(tmp_path / "stubs")
    words = [groovy, "-cp", str(stubs), f"-Dwanted={tmp_path / 'wanted.json'}", str(maps / "qupath.groovy")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOG "))
    return json.loads(line.removeprefix("LOG ")), done.stdout


def features(maps: Path) -> list[dict[str, Any]]:
    entry = json.loads((maps / "heatmaps.json").read_text())["slides"]["slide.zarr"]
    return [f for key in ("outlines", "tiles") for f in json.loads((maps / entry[key]).read_text())["features"]]


def test_a_slide_that_qupath_crops_gets_objects_that_are_moved(maps: Path, tmp_path: Path) -> None:
    shown = {"uri": (maps.parent / "slide.scn").as_uri(), "width": 640, "height": 512}
    log, _ = run(maps, tmp_path, images=[shown], shown=0)
    assert log["saved"] == [shown["uri"]] and not log["added"]
    found, expected = log["objects"][0], features(maps)
    assert [one["id"] for one in found] == [one["id"] for one in expected] and len(found) > 10
    for one, other in zip(found, expected):
        moved, there = (np.array(f["geometry"]["coordinates"][0]) for f in (one, other))
        np.testing.assert_allclose(moved, there - [301, 203])
        assert one["properties"] == other["properties"]
    (overlay,) = log["overlays"]
    place = json.loads((maps / "heatmaps.json").read_text())["slides"]["slide.zarr"]["place"]
    x, y, width, height = overlay["region"]
    assert (x, y) == (place["origin"][1] - 301, place["origin"][0] - 203)
    alpha = np.array(overlay["alpha"])
    assert abs(width - alpha.shape[1] * STRIDE * 1.46) < 1 and abs(height - alpha.shape[0] * STRIDE * 1.46) < 1
    assert alpha[4, 6] == 200 and alpha[9, 2] == 100 and alpha.sum() == 300


@pytest.mark.full
def test_a_whole_slide_is_added_and_another_image_left_alone(maps: Path, tmp_path: Path) -> None:
    other = {"uri": "file:/somewhere/other.svs", "width": 5, "height": 5}
    log, _ = run(maps, tmp_path, images=[other], width=1500, height=1200)
    assert [Path(uri).name for uri in log["added"]] == ["slide.scn"] and not log["overlays"]
    assert log["objects"][0] == features(maps)


@pytest.mark.full
def test_a_store_in_place_of_the_slide_is_named(maps: Path, tmp_path: Path) -> None:
    store = {"uri": "file:/somewhere/slide.zarr", "width": 438, "height": 352}
    log, text = run(maps, tmp_path, images=[store])
    assert not log["saved"] and "open the original slide" in text
