"""`wsi-train tissue`, and rules in `preprocess`: as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import shapely
import zarr

from tests.wsi_trainer.slides.artefacts import ink, renderer, spoilt, stroke
from wsi_trainer.cli import main
from wsi_trainer.slide.tissue import draw_tissue
from wsi_trainer.synthetic import SlideSpec, SyntheticSlide
from wsi_trainer.synthetic.pyramid import write_pyramid

NAME = "a [b] 100%"
SHAPE = (1100, 1000)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide with a pen mark and one without."""
    folder = tmp_path_factory.mktemp("slides")
    for number, name in enumerate((NAME, "clean")):
        made = SyntheticSlide(SlideSpec(*SHAPE, seed=number, noise=True, tissue=0.35))
        marks = [ink(stroke([(100, 100), (800, 800)], 180), "blue")] if name == NAME else []
        pixels = spoilt(made.render(0, 0, *SHAPE), *marks)
        write_pyramid(folder / f"{name}.tif", renderer(pixels), SHAPE, mpp=0.5)
    return folder


@pytest.fixture(scope="module")
def looked(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("looked") / "out"
    assert main(["tissue", str(slides), str(out), "--workers=1", "--stall-minutes=0"]) == 0
    return out


def _polygons(path: Path, kind: str) -> Any:
    features = json.loads(path.read_text())["features"]
    return shapely.union_all(
        [shapely.geometry.shape(f["geometry"]) for f in features if f["properties"]["classification"]["name"] == kind]
    )


def test_outlines_and_page(looked: Path) -> None:
    tissue, pen = (_polygons(looked / f"{NAME}.geojson", kind) for kind in ("Tissue", "Removed: pen"))
    mark = shapely.LineString([(100, 100), (800, 800)]).buffer(90)
    assert pen.intersection(mark).area > 0.6 * mark.area
    assert tissue.intersection(pen).area == 0
    page = (looked / "tissue.html").read_text()
    assert page.index("a [b] 100%</b>") < page.index("clean</b>"), "the slide that lost more comes first"
    assert unquote("thumbnails/a%20%5Bb%5D%20100%25.rules.png") == f"thumbnails/{NAME}.rules.png"
    assert "thumbnails/a%20%5Bb%5D%20100%25.rules.png" in page
    assert (looked / "thumbnails" / f"{NAME}.rules.png").is_file()


@pytest.mark.slow
def test_what_was_edited_is_kept_shown_and_converted(slides: Path, looked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(looked, out)
    outlines = out / f"{NAME}.geojson"
    content = json.loads(outlines.read_text())
    square = [[160, 160], [800, 160], [800, 640], [160, 640], [160, 160]]
    kept = [f for f in content["features"] if f["properties"]["classification"]["name"].startswith("Removed")]
    drawn = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [square]}, "properties": {}}
    outlines.write_text(json.dumps([drawn, *kept]))  # as QuPath writes it without a collection
    edited = outlines.read_bytes()
    before = (out / "clean.geojson").stat().st_mtime_ns
    for _ in range(2):
        assert main(["tissue", str(slides), str(out), "--workers=1", "--stall-minutes=0"]) == 0
        assert outlines.read_bytes() == edited
        assert (out / "clean.geojson").stat().st_mtime_ns == before
        assert "edited by hand" in (out / "tissue.html").read_text()
    words = ["preprocess", str(slides), str(tmp_path / "stores"), "--tissue=geojson", f"--geojson={out}", "--workers=1"]
    assert main(words) == 0
    label = zarr.open_array(tmp_path / "stores" / f"{NAME}.zarr" / "labels" / "tissue" / "0", mode="r")[:]
    expected = np.zeros(SHAPE, bool)
    expected[160:640, 160:800] = True
    assert np.array_equal(label > 0, expected)
    outlines.write_text(json.dumps([{**drawn, "id": "again"}]))
    assert main(words) == 1, "the store is of other outlines"
    assert main([*words, "--overwrite"]) == 0
    assert main(["tissue", str(slides), str(out), "--workers=1", "--overwrite"]) == 0
    assert outlines.read_bytes() == (looked / f"{NAME}.geojson").read_bytes()


def test_outlines_of_another_tool_are_not_written_over(slides: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "clean.geojson").write_text("mine")
    assert main(["tissue", str(slides / "clean.tif"), str(tmp_path)]) == 1
    assert (tmp_path / "clean.geojson").read_text() == "mine"
    assert "another tool" in " ".join(capsys.readouterr().out.split())


def test_rules_in_preprocess(slides: Path, looked: Path, tmp_path: Path) -> None:
    words = ["preprocess", str(slides / f"{NAME}.tif"), str(tmp_path), "--rules=usual"]
    assert main(words) == 0
    label = zarr.open_array(tmp_path / f"{NAME}.zarr" / "labels" / "tissue" / "0", mode="r")[::16, ::16] > 0
    mask = draw_tissue(looked / f"{NAME}.geojson", label.shape, 16, (16.0, 16.0)).mask
    assert np.array_equal(label, mask), "both commands find the same"
    made = json.loads((tmp_path / f"{NAME}.zarr" / "zarr.json").read_text())["attributes"]["wsi_trainer"]
    assert set(made["settings"]["rules"]) == {"pen", "blur"}
    assert made["tissue"]["rules"]["pen"] > 0.05
    assert "pen " in (tmp_path / "stores.csv").read_text()
    assert ".rules.png" in (tmp_path / "tissue.html").read_text()
    assert main(words) == 0
    assert main([*words, "--pen.grow=80"]) == 1
    assert main([*words[:-1], "--rules=none"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rules=pencil"], "'pencil' is no rule"),
        (["--pen.grow=-3"], "--pen.grow -3: expected 0 to 1000"),
        (["--rules=pen", "--fold.darker=2"], "--fold.* is given"),
        (["--workers=0"], "expected 1 or more"),
    ],
)
def test_mistakes_are_named(slides: Path, tmp_path: Path, capsys: Any, words: list[str], said: str) -> None:
    assert main(["tissue", str(slides), str(tmp_path), *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "tissue.html").exists()


@pytest.mark.slow
def test_the_page_in_a_browser(looked: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = next((p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(program), args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(request.url))
        page.goto((looked / "tissue.html").as_uri())
        page.wait_for_load_state("networkidle")
        widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
        page.click("figure .stack")
        assert page.evaluate("document.querySelectorAll('figure.wide').length") == 1
        page.fill("#search", "CLEAN")
        assert page.evaluate("[...document.querySelectorAll('figure')].filter(f => !f.hidden).length") == 1
        browser.close()
    assert len(widths) == 4
    assert min(widths) > 0
    assert not said


@pytest.mark.parametrize("failing", [2, 4, 7])
def test_outlines_of_a_run_that_died_are_not_taken_for_somebodys(
    slides: Path, looked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Wherever it died, over outlines of other rules, the same command makes what an undisturbed run makes."""
    command = ["tissue", str(slides / "clean.tif"), str(tmp_path), "--stall-minutes=0"]
    assert main([*command, "--rules=none"]) == 0
    rename, calls = os.replace, 0

    def die(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        died = main(command) != 0
    assert died is (failing <= 6), "thumbnail, overlay, record, outlines, page and table"
    assert main(command) == 0
    assert (tmp_path / "clean.geojson").read_bytes() == (looked / "clean.geojson").read_bytes()
    assert "edited by hand" not in (tmp_path / "tissue.html").read_text()
