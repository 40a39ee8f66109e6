"""Slides of another resolution than those that a run was trained on: read at the run's, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.wsi_trainer.small import QUICK, VGG, rows
from tests.wsi_trainer.test_uses import SPLITS, cohort, pixels, write_svs, write_table
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import read_predictions

FIT = [*VGG, *QUICK]


def predicted(path: Path) -> dict[str, float]:
    return {Path(row["slide"]).stem: float(row["probability_1"]) for row in rows(path)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on stores of 1 µm, of slides of 0.5 µm."""
    folder = tmp_path_factory.mktemp("coarse")
    slides = cohort(folder / "slides", "svs")
    stores = folder / "stores"
    assert main(["preprocess", str(slides.table), str(stores), "--mpp=1", "--workers=1"]) == 0
    words = [f"--out={folder / 'run'}", f"--data.manifest={slides.table}", f"--data.stores={stores}"]
    assert main(["fit", *words, *FIT]) == 0
    return Run(folder / "run")


@pytest.mark.slow
def test_a_finer_slide_is_read_at_the_resolution_of_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The slides themselves, of 0.5 µm, get the predictions of their stores of 1 µm."""
    assert read_json(run.path / "run.json")["seen"] == {"finest": 1.0, "coarsest": 1.0, "painted": False}
    kept = [record for record in run.kept() if record.split == "test"]
    table = run.path.parent / "slides" / "slides.csv"
    raw = [table.parent / f"{record.path.stem}.svs" for record in kept]
    for _ in range(2):
        capsys.readouterr()
        words = ["predict", str(run.path), str(table), "--name=raw", "--data.stores=null", "--overwrite"]
        assert main(words) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "8 slides are read at 1 µm a pixel, as those of training: s00.svs has 0.5" in said
    known = read_predictions(run.predictions_file("test"))
    ours = predicted(run.path / "cohorts" / "raw" / "predictions.csv")
    for slide, probability in zip(known.slides, known.probabilities[:, 1], strict=True):
        assert ours[Path(slide).stem] == pytest.approx(probability, abs=1e-5)
    opened = Run.open(run.path)
    assert opened.predict(raw[0])["probability_1"] == pytest.approx(ours[raw[0].stem], abs=1e-5)


def test_another_cohort_is_tested_and_mapped_at_the_resolution_of_the_run(run: Run, tmp_path: Path) -> None:
    external = cohort(tmp_path / "external", "svs", first=20, count=3, split=False)
    words = [str(run.path), "--name=ext", "--data.stores=null"]
    assert main(["test", *words, f"--cohort={external.table}"]) == 0
    assert main(["heatmap", *words]) == 0
    entry = json.loads(next((run.path / "cohorts" / "ext").rglob("heatmaps.json")).read_text())["slides"]["s20.svs"]
    assert entry["place"]["scale"] == [2.0, 2.0]


def test_a_coarser_slide_is_refused_by_name(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = next(record.path for record in run.kept() if record.split == "test")
    fine = cohort(tmp_path / "fine", "svs")
    assert main(["fit", f"--out={tmp_path / 'run'}", f"--data.manifest={fine.table}", *FIT]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(store)]) == 2
    error = capsys.readouterr().err
    assert store.stem in error and "has 1 µm a pixel, and the run was trained at 0.5 µm a pixel" in error
    assert not (tmp_path / "run" / "cohorts").exists()


def test_a_slide_of_unknown_resolution_needs_it_from_the_manifest(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(pixels(tmp_path, 30)).save(tmp_path / "odd.png")
    assert main(["predict", str(run.path), str(tmp_path / "odd.png")]) == 2
    assert "slide odd does not say how large its pixels are" in (error := capsys.readouterr().err)
    assert "the column mpp" in error
    row = {"slide": "odd.png", "label": "", "patient": "", "split": "", "mpp": "0.5"}
    table = write_table(tmp_path / "odd.csv", [row])
    assert main(["predict", str(run.path), str(table), "--data.stores=null"]) == 0
    assert "odd.png has 0.5" in " ".join(capsys.readouterr().out.split())


def test_a_run_on_slides_of_two_resolutions_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    rows = []
    for number, split in enumerate(SPLITS):
        data = pixels(slides, number)
        path = write_svs(slides, f"s{number}", data if number % 2 else np.ascontiguousarray(data[::2, ::2]))
        mpp = "0.5" if number % 2 else "1.0"
        rows.append({"slide": path.name, "label": str(number // 2 % 2), "patient": "", "split": split, "mpp": mpp})
    table = write_table(slides / "slides.csv", rows)
    assert main(["fit", f"--out={tmp_path / 'run'}", f"--data.manifest={table}", *FIT]) == 0
    assert "the slides of the split train have 0.5 to 1 µm a pixel" in caplog.text
