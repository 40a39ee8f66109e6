"""The report of a run from somebody else, or of a damaged one: pictures of the run only, and one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.slide.names import result_names

from .conftest import SLIDES, MakeRun

SLIDE = "slide 0 <&>.tif"


@pytest.fixture
def run(make_run: MakeRun, labels: np.ndarray) -> Run:
    return make_run("run", np.where(labels == 1, 0.9, 0.1) + np.linspace(-0.05, 0.05, SLIDES))


def refused(run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(run.path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert not run.report.exists()
    return error


def with_picture(run: Run, picture: str) -> Run:
    run.maps("activation").mkdir(parents=True, exist_ok=True)
    facts = {"class": "tumour", "slides": {SLIDE: {"picture": picture}}}
    (run.maps("activation") / "heatmaps.json").write_text(json.dumps(facts))
    return run


@pytest.mark.parametrize(
    "picture", ["../../../outside.png", "{tmp}/outside.png", "/etc/passwd", "link.png", "../../link/outside.png"]
)
def test_a_picture_outside_of_the_run_is_refused(
    picture: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "outside.png")
    run.maps("activation").mkdir(parents=True)
    (run.maps("activation") / "link.png").symlink_to(tmp_path / "outside.png")
    (run.path / "link").symlink_to(tmp_path)
    assert "outside of the run" in refused(with_picture(run, picture.format(tmp=tmp_path)), capsys)


def test_outlines_outside_of_the_run_are_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outside.geojson").write_text('{"type": "FeatureCollection", "features": []}')
    run.segments.mkdir()
    facts = {"slides": {SLIDE: {"outlines": "../../outside.geojson"}}}
    (run.segments / "segments.json").write_text(json.dumps(facts))
    assert "outside of the run" in refused(run, capsys)


FILES = [
    "heatmaps/activation/heatmaps.json", "evaluation/test.json", "plan.json", "memory.json", "environment.json",
    "segments/segments.json",
]  # fmt: skip
TEXTS = [b"{", b"[]", b"null", b"\xff\xfe", b'"text"', b'{"slides": [1]}', b'{"slides": {"slide 0 <&>.tif": 3}}']


CASES = [("heatmaps/activation/heatmaps.json", text) for text in TEXTS] + [(name, TEXTS[0]) for name in FILES[1:]]
CASES += [(name, text) for name in ("plan.json", "evaluation/test.json") for text in (b"[]", b'{"slides": [1]}')]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_damaged_file_is_named_or_left_out(
    name: str, text: bytes, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / name).parent.mkdir(parents=True, exist_ok=True)
    (run.path / name).write_bytes(text)
    code = main(["report", str(run.path)])
    error = capsys.readouterr().err
    assert code in (0, 2), error
    assert (code == 0 and not error) or (Path(name).name in error and error.count("\n") == 1)
    if text in (b"{", b"\xff\xfe"):
        assert code == 2


def test_results_are_called_by_their_slide() -> None:
    names = [
        "a/b.tif", "c/B.svs", "a_b.tif", "/data/slides/one.ome.tiff", "s.1", "s.zarr", "../case 3.ndpi", ".tif",
        "x" * 250, "x" * 249 + "y", "ü" * 120,
    ]  # fmt: skip
    made = result_names(names)
    assert [made[name] for name in names[2:7]] == ["a_b", "one", "s.1", "s", "case 3"]
    assert made["a/b.tif"].startswith("b-") and made["c/B.svs"].startswith("B-")
    assert len({name.casefold() for name in made.values()}) == len(names)
    assert all("/" not in name and len(os.fsencode(f"{name}-top-10.png")) <= 255 for name in made.values())
