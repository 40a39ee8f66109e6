"""Findings of rules beside the mask of tissue, in the report."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.wsi_trainer.report.conftest import SLIDES, MakeRun
from tests.wsi_trainer.slides.artefacts import ink, renderer, spoilt, stroke
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest, write_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.report.pictures import overlay_of, rules_shown, tissue_picture
from wsi_trainer.report.render import write_report
from wsi_trainer.slide.rules import RULES
from wsi_trainer.synthetic import SlideSpec, SyntheticSlide
from wsi_trainer.synthetic.pyramid import write_pyramid

SHAPE = (700, 900)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, in a folder of the results, of a slide with a green mark."""
    folder = tmp_path_factory.mktemp("tissue")
    (folder / "in" / "a").mkdir(parents=True)
    made = SyntheticSlide(SlideSpec(*SHAPE, seed=1, noise=True, tissue=0.35))
    marks = [ink(stroke([(100, 100), (800, 600)], 150), "green")]
    for name in ("b", "c"):
        pixels = spoilt(made.render(0, 0, *SHAPE), *(marks if name == "b" else []))
        write_pyramid(folder / "in" / "a" / f"{name}.tif", renderer(pixels), SHAPE, mpp=0.5)
    words = ["preprocess", str(folder / "in"), str(folder / "out"), "--rules=pen", "--workers=1", "--stall-minutes=0"]
    assert main(words) == 0
    return next((folder / "out").rglob("b.zarr"))


def test_the_overlay_of_a_store_is_found(store: Path, tmp_path: Path) -> None:
    overlay = overlay_of(store)
    assert overlay is not None and overlay.name == "b.rules.png"
    assert overlay_of(store.with_suffix(".tif")) is None and overlay_of(tmp_path / "b.zarr") is None
    assert [row.name for row in rules_shown([overlay])] == ["pen"] and rules_shown([]) == []


def test_findings_are_in_the_colour_of_their_rule(store: Path, tmp_path: Path) -> None:
    overlay = overlay_of(store)
    assert overlay is not None
    picture = Image.open(io.BytesIO(base64.b64decode(tissue_picture(overlay).split(",")[1])))
    shown = np.asarray(picture.convert("RGB"), np.float64)
    found = np.asarray(Image.open(overlay).resize(picture.size, Image.Resampling.NEAREST)) > 0
    colour = np.array(next(rule.colour for rule in RULES if rule.name == "pen"), np.float64)
    away = np.abs(shown - colour).mean(axis=2)
    assert found.any() and away[found].mean() < 60 < away[~found].mean()
    (tmp_path / "b.rules.png").write_bytes(overlay.read_bytes())
    (tmp_path / "b.jpg").write_bytes(b"no picture")
    with pytest.raises(UserError, match="is no picture any more; convert the slide again"):
        tissue_picture(tmp_path / "b.rules.png")


@pytest.mark.slow
def test_the_report_shows_them_with_a_legend(store: Path, make_run: MakeRun) -> None:
    run = make_run("run", np.linspace(0, 1, SLIDES))
    plain = write_report(run).read_text()
    assert "what rules found" not in plain
    first, *others = read_manifest(run.splits)
    write_manifest(run.splits, [replace(first, path=store), *others])
    page = write_report(run).read_text()
    assert page.count("what rules found on") == 1 and "pen (pen marks: black, blue, green, red)" in page
    assert "fold (folded tissue)" not in page
