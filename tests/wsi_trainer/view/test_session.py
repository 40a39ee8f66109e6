"""A session as a user has it, recorded as pictures: train, view, the worst mistake, a region, the same place in QuPath.

It runs with `--full`, and keeps the pictures in docs/figures/session.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest

from tests.conftest import ROOT
from tests.wsi_trainer.view.conftest import open_page, serving
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene

COARSER = 2
"""Stores have 1 µm a pixel, slides 0.5: places in a store are not those in its slide."""
PICTURE = 224


@dataclass(frozen=True)
class Session:
    """Results of the commands: slides, and a run that was trained on stores of them."""

    slides: Path
    run: Run


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("session")
    splits = {"train": 0.34, "val": 0.33, "test": 0.33}
    manifest = generate(folder, slides=6, seed=5, shape=(1024, 1280), splits=splits, workers=1, tissue=0.5)
    stores = folder / "stores"
    assert main(["preprocess", str(manifest), str(stores), "--mpp=1", "--workers=1"]) == 0
    words = [
        f"--out={folder / 'run'}", f"--data.manifest={manifest}", f"--data.stores={stores}",
        "--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[8,12,16]", "--model.backbone.convs=1",
        "--model.head=wsi_trainer.models.GeneralisedMeanPooling", "--model.learning_rate=0.003",
        "--train.epochs=1", "--train.accelerator=cpu", "--train.budget=null", "--train.resamples=20",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    run = Run(folder / "run")
    maps = [f"--originals={folder / 'slides'}", f"--regions={folder / 'lesions'}"]
    assert main(["heatmap", str(run.path), "--overwrite", *maps]) == 0
    return Session(folder / "slides", run)


class Album:
    """Takes a numbered picture of the page after each thing that is done."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder, self.taken = page, folder, []

    def take(self, name: str) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.wait_for_timeout(600)  # animations
        path = self.folder / f"{len(self.taken) + 1}-{name}.jpg"
        self.page.screenshot(path=path, type="jpeg", quality=75)
        self.taken.append(path)


def shown_picture(page: Any) -> np.ndarray:
    """The picture at full resolution of the place that was clicked."""
    values = page.evaluate(
        """async () => {
          const image = document.querySelector('#here-picture');
          await image.decode();
          const canvas = document.createElement('canvas');
          [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
          canvas.getContext('2d').drawImage(image, 0, 0);
          return Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data);
        }"""
    )
    return np.array(values, np.uint8).reshape(PICTURE, PICTURE, 4)[..., :3].astype(np.float64)


def said_place(page: Any) -> tuple[int, int]:
    """The place that the page says, in pixels of the slide."""
    page.wait_for_function("() => document.querySelector('#here-text').textContent.includes('rank')")
    found = re.search(r"x (-?\d+) px, y (-?\d+) px", page.locator("#here-text").text_content())
    assert found is not None
    return int(found[1]), int(found[2])


def of_openslide(path: Path, x: int, y: int) -> np.ndarray:
    """The same picture by OpenSlide alone: level 0 of the original slide about a place, averaged to the store's."""
    side = PICTURE * COARSER
    with openslide.OpenSlide(path) as slide:
        corner = (x - side // 2, y - side // 2)
        read = np.asarray(slide.read_region(corner, 0, (side, side)), np.float64)
    pixels = np.where(read[..., 3:] == 0, 255, read[..., :3])  # beyond the slide, which the page shows white
    return pixels.reshape(PICTURE, COARSER, PICTURE, COARSER, 3).mean(axis=(1, 3))


def compare(page: Any, original: Path, place: tuple[int, int]) -> None:
    """The picture on the page is the slide's at that place: it is at least twice as like as at any other within two
    pixels.

    It is not the same bit for bit: OpenSlide decodes colours of JPEG otherwise than the reader that made the store.
    """
    shown = shown_picture(page)
    x, y = (at // COARSER * COARSER for at in place)  # a picture begins with a whole pixel of the store
    shifts = [(across, down) for across in range(-2, 3) for down in range(-2, 3)]
    found = {shift: np.abs(shown - of_openslide(original, x + shift[0], y + shift[1])).mean() for shift in shifts}
    here = found.pop((0, 0))
    assert here < 3 and here < min(found.values()) / 2


def rectangle_of(feature: dict[str, Any]) -> tuple[float, float, float, float]:
    ring = np.array(feature["geometry"]["coordinates"][0])
    return (*ring.min(axis=0), *ring.max(axis=0))


@pytest.mark.full  # makes the pictures of docs/figures/session; test_browser.py has its parts
def test_from_the_worst_mistake_to_the_same_place_in_qupath(page: Any, session: Session, tmp_path: Path) -> None:
    predictions = read_predictions(session.run.predictions_file("test"))
    order = np.argsort(-predictions.errors(), kind="stable")
    worst = predictions.slides[order[0]]
    original = session.slides / Path(worst).with_suffix(".tif").name
    album = Album(page, tmp_path)
    drawn = session.slides.parent / "lesions"
    with serving(Scene(contents_of(session.run.path, regions=drawn))) as served:
        # The list opens with the worst mistake.
        open_page(page, served.address)
        assert page.locator("#slides li .name").all_text_contents()[: len(order)] == [
            predictions.slides[row] for row in order
        ]
        assert page.locator("#about").text_content().startswith(worst)
        album.take("worst-mistake")

        # The place that speaks most for the class, and the slide there.
        page.keyboard.press("1")
        place = said_place(page)
        album.take("largest-value")
        compare(page, original, place)

        # It is where QuPath's tile with the largest value is.
        folder = session.run.maps("activation")
        name = Path(json.loads((folder / "heatmaps.json").read_text())["slides"][worst]["array"]).stem
        tiles = json.loads((folder / "tiles" / f"{name}.geojson").read_text())["features"]
        largest = max(tiles, key=lambda tile: tile["properties"]["measurements"]["largest value"])
        left, top, right, bottom = rectangle_of(largest)
        assert abs((left + right) / 2 - place[0]) <= 1 and abs((top + bottom) / 2 - place[1]) <= 1

        # An outlined region: its borders on the page, and a click in the middle of it.
        page.keyboard.press("o")
        page.keyboard.press("t")
        page.wait_for_function("() => document.querySelector('#message').textContent === ''")
        album.take("outlines-and-tissue")
        regions = [rectangle_of(one) for one in json.loads((folder / f"{name}.geojson").read_text())["features"]]
        middles = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in regions]
        x, y = max(middles, key=lambda middle: np.hypot(middle[0] - place[0], middle[1] - place[1]))
        page.evaluate(
            "([slide, x, y]) => { location.hash = new URLSearchParams({ slide, x, y, scale: 1, left: 0 }); }",
            [worst, x / COARSER, y / COARSER],
        )
        page.wait_for_function(f"() => location.hash.includes('x={x / COARSER:.0f}')")
        page.wait_for_load_state("networkidle")
        page.evaluate("() => { document.querySelector('#here-text').textContent = ''; }")  # of the place before
        box = page.locator("#left").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        place = said_place(page)
        assert abs(place[0] - x) <= 2 * COARSER and abs(place[1] - y) <= 2 * COARSER
        album.take("region")
        compare(page, original, place)
        page.goto("about:blank")  # before the server ends
    assert all(path.stat().st_size > 10_000 for path in album.taken)
    kept = ROOT / "docs" / "figures" / "session"
    kept.mkdir(exist_ok=True)
    for path in album.taken:
        shutil.copy(path, kept / path.name)
