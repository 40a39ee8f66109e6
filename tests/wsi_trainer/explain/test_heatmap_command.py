"""`wsi-train heatmap` on a small run."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.report.contents import RunResults, slide_rows
from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("heatmap")
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    shape = (256, 256)  # of all, so that one plan serves them
    manifest = generate(folder / "slides", slides=8, seed=1, splits=splits, workers=1, shape=shape)
    words = [
        "fit", f"--out={folder / 'run'}", f"--data.manifest={manifest}", "--train.epochs=1",
        "--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[4,8,8]",
    ]  # fmt: skip
    assert main(words) == 0
    return Run(folder / "run"), manifest.parent / "lesions"


@pytest.mark.slow
def test_writes_a_picture_and_an_array_for_each_slide(
    run: tuple[Run, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lesions = run
    assert (
        main(["heatmap", str(folder.path), "--overwrite", f"--regions={lesions}", "--size=64", "--train.budget=64MiB"])
        == 0
    )
    assert "of the map's positive values for '1'" in capsys.readouterr().out.replace("\n", " ")
    maps = folder.maps("activation")
    facts = json.loads((maps / "heatmaps.json").read_text())
    assert facts["annotated_slides"] >= 1 and 0 < facts["area_inside"] < 1
    rows = slide_rows(RunResults.load("run", folder, "test"), None)
    assert len(rows) == len(facts["slides"]) and all(row.maps["activation"].is_file() for row in rows)
    for entry in facts["slides"].values():
        values = np.load(maps / entry["array"])
        assert values.ndim == 2 and np.isfinite(values).all()
        assert max(Image.open(maps / entry["picture"]).size) <= 512
        np.testing.assert_array_equal(zarr.open_array(maps / entry["layer"] / "0", mode="r")[:], values)
        assert len(read_regions(maps / entry["outlines"])) == entry["outlined_regions"]
        assert all(Image.open(maps / one["picture"]).size == (one["width"], 64) for one in entry["top"])
        assert 0 < entry["peak_bytes"] <= 64 * 2**20
    assert main(["report", str(folder.path)]) == 0
    page = folder.report.read_text(encoding="utf-8")
    assert 'title="activation"' in page and "has no maps of what" not in page
    scores = json.loads((maps / "scores.json").read_text())
    assert scores["split"] == "test" and 0 <= scores["lesions"]["slide"]["froc"]["value"] <= 1
    assert "Lesions detected by class" in page and "FROC, bands" in page and "Borders by class" not in page


def test_a_split_without_slides_is_named(run: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heatmap", str(run[0].path), "--overwrite", "--split=holdout"]) == 2
    assert "no slide is in the split holdout" in capsys.readouterr().err


def test_another_method_and_target_are_said(
    run: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["heatmap", str(run[0].path), "--overwrite", "--split=val", "--train.budget=64MiB"]
    assert main([*words, "--method=integrated", "--steps=2", "--target=0", "--top=0"]) == 0
    facts = json.loads((run[0].maps("integrated-0", "val") / "heatmaps.json").read_text())
    assert facts["class"] == "0" and facts["method"] == "integrated"
    assert all(not entry["top"] for entry in facts["slides"].values())
    assert main([*words, "--method=attention"]) == 2
    assert "choose another --method" in capsys.readouterr().err
    assert main([*words, "--target=2"]) == 2
    assert "--target is '2'; this model has 0, 1" in capsys.readouterr().err


@pytest.mark.slow
def test_maps_of_splits_stay_side_by_side(run: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, lesions = run
    assert main(["validate", str(folder.path)]) == 0
    words = ["heatmap", str(folder.path), "--train.budget=64MiB", "--top=1", f"--regions={lesions}", "--overwrite"]
    assert main([*words, "--split=test"]) == 0
    first = {path: path.read_bytes() for path in folder.maps("activation").rglob("*") if path.is_file()}
    assert main([*words, "--split=val"]) == 0
    assert {path: path.read_bytes() for path in first} == first
    facts = [json.loads((folder.maps("activation", split) / "heatmaps.json").read_text()) for split in ("test", "val")]
    assert [one["split"] for one in facts] == ["test", "val"] and facts[0]["checkpoint"] == "best"
    for split in ("test", "val"):
        results = RunResults.load("run", folder, split)
        rows = slide_rows(results, None)
        assert rows and all(row.maps["activation"].is_relative_to(folder.maps("activation", split)) for row in rows)
        assert results.regions is not None and set(results.regions.lesions.slides) <= {row.slide for row in rows}
        assert main(["report", str(folder.path), f"--split={split}"]) == 0
        page = folder.report.read_text(encoding="utf-8")
        assert page.count('title="activation"') == len(rows) and "has no maps of what" not in page
    shown = [slide for slide in contents_of(folder.path).slides if slide.split in ("val", "test")]
    assert shown and all([one.title for one in slide.maps].count("activation, 1") == 1 for slide in shown)


@pytest.mark.slow
def test_maps_of_methods_and_targets_stay_side_by_side(
    run: tuple[Run, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lesions = run
    words = ["heatmap", str(folder.path), "--train.budget=64MiB", "--top=0", "--split=test"]
    assert main([*words, f"--regions={lesions}", "--overwrite"]) == 0
    first = {path: path.read_bytes() for path in folder.maps("activation").rglob("*") if path.is_file()}
    for another in ("--method=gradient", "--target=0"):
        assert main([*words, another]) == 0
        assert {path: path.read_bytes() for path in first} == first
        capsys.readouterr()
        assert main([*words, another]) == 2
        assert "give --overwrite" in capsys.readouterr().err
    assert main([*words, "--target=1"]) == 2, "the target without a name"
    for _ in range(2):
        assert main(["report", str(folder.path)]) == 0
        page = folder.report.read_text(encoding="utf-8")
        slides = len(RunResults.load("run", folder, "test").predictions)
        assert page.count('title="activation"') == page.count('title="gradient"') == slides
        assert page.count('title="activation-0"') == slides and "Maps of activation for 0" in page
        assert "Share of the activation map in the true regions" in page
    shown = [slide for slide in contents_of(folder.path).slides if slide.split == "test"]
    assert all(
        {"activation, 1", "activation, 0", "gradient, 1"} <= {one.title for one in slide.maps} for slide in shown
    )
