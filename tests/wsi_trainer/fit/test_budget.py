"""A run within a budget is the run without one: same losses, same predictions."""

import csv
from pathlib import Path

import numpy as np
import pytest

from lightning_plugin import Grid, Plan
from lightning_plugin.plan import Forecast, SegmentForecast, SegmentPlan
from wsi_trainer.cli import main
from wsi_trainer.fit.cost import estimate, sentence
from wsi_trainer.fit.folder import read_curves
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import ClassPredictions


def losses(folder: Run) -> list[float]:
    """The loss of every step."""
    with (folder.metrics / "version_0" / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]]


def test_losses_and_predictions_are_those_of_plain_pytorch(
    square_slides: Path, words: list[str], tmp_path: Path
) -> None:
    common = [*words, f"--data.manifest={square_slides}", "--train.precision=64-true", "--train.epochs=2"]
    assert main(["fit", *common]) == 0
    assert main(["fit", *common, f"--out={tmp_path / 'tiled'}", "--train.budget=3MiB"]) == 0
    plain, tiled = Run(tmp_path / "run"), Run(tmp_path / "tiled")
    curves = [read_curves(folder.metrics) for folder in (plain, tiled)]
    assert curves[0].keys() == curves[1].keys()
    for column in ("train_loss", "val_loss"):
        np.testing.assert_allclose(curves[1][column], curves[0][column], rtol=1e-8, err_msg=column)
    steps = [losses(folder) for folder in (plain, tiled)]
    assert len(steps[0]) >= 12 and steps[0][0] != steps[0][-1]
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-8)
    predictions = [ClassPredictions.read(folder.predictions_file("test")) for folder in (plain, tiled)]
    np.testing.assert_allclose(predictions[1].probabilities, predictions[0].probabilities, rtol=1e-8)
    facts = [read_json(folder.memory) for folder in (plain, tiled)]
    assert facts[1]["engine"].startswith("SFTStrategy") and facts[1]["budget"] == "3MiB"
    assert 0 < facts[1]["step_peak_bytes"] < facts[1]["plain_bytes"]
    assert facts[1]["plain_bytes"] == pytest.approx(facts[0]["plain_bytes"], rel=0.05)
    assert tiled.plan.is_file() and not plain.plan.exists()
    assert main(["report", str(tiled.path), f"--baseline={plain.path}"]) == 0
    page = tiled.report.read_text(encoding="utf-8")
    assert "measured peak of a step" in page and "The plan of the largest training step" in page


def test_a_budget_too_small_is_one_line_that_names_the_smallest(
    square_slides: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words, f"--data.manifest={square_slides}", "--train.budget=100B"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("wsi-train: error:") and "100 B" in error and "KiB" in error


# -- what a run is expected to cost, before it starts


GIB = 2**30


def test_a_slide_takes_its_share_of_the_largest_ones_time() -> None:
    figures = SegmentForecast(stored_bytes=3 * GIB)
    stored = SegmentPlan((1,), Grid((2, 2)), Grid((2, 2)), tier="disk", forecast=figures)
    forecast = Forecast(peak_bytes=7 * GIB, plain_bytes=90 * GIB, seconds=60.0)
    plan = Plan((stored,), budget=8 * GIB, forecast=forecast)
    shapes = {"train": {"a": (1, 3, 1000, 2000), "b": (1, 3, 1000, 1000)}, "val": {"c": (1, 3, 1000, 2000)}}
    facts = estimate(plan, shapes, shapes["train"]["a"], 8 * GIB, 1, 5 * 2**20)
    assert facts["train_seconds"] == pytest.approx(90) and facts["validation_seconds"] == pytest.approx(20)
    assert facts["device_bytes"] == 7 * GIB and facts["disk_bytes"] == 3 * GIB and facts["host_bytes"] == 0
    assert estimate(plan, shapes, shapes["train"]["a"], 8 * GIB, 2, 0)["train_seconds"] == pytest.approx(45)
    assert (
        estimate(plan, shapes, shapes["train"]["a"], None, 1, 0)["device_bytes"] == 90 * GIB
    )  # plain PyTorch holds it all
    said = sentence(facts | {"patches": None})
    for part in (
        "2 slides to train on and 1 to validate",
        "2 min an epoch",
        "7.0 GiB on the device of 8.0 GiB",
        "disk",
    ):
        assert part in said, part


def test_a_run_says_it_before_its_first_step(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--data.manifest={square_slides}", "--train.budget=16MiB", "--train.epochs=1"]
    assert main(["fit", *words, *options]) == 0
    shown = capsys.readouterr().out
    assert shown.index("6 slides to train on") < shown.index("Epoch 0")
    facts = read_json(Run(tmp_path / "run").estimate)
    assert facts["largest"] == [256, 256] and facts["pixels"]["train"] == 6 * 256 * 256
    assert 0 < facts["device_bytes"] <= facts["budget"] == 16 * 2**20 and facts["seconds_per_epoch"] > 0


def test_a_missing_slide_is_named_before_anything_runs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.csv").write_text("slide,label\ngone.svs,0\nalso.svs,1\n")
    assert main(["fit", *words, f"--data.manifest={tmp_path / 'm.csv'}"]) == 2
    error = capsys.readouterr().err
    assert "2 of 2 slides are missing" in error and "gone.svs" in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_that_cannot_be_estimated_says_so_and_trains(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second magnification reads running statistics that the first has still to write."""
    shared = ["--model.backbone.norm=batch", "--model.batchnorm_over=tissue", "--model.share_backbone=true"]
    scales = ["--model.magnifications=2", "--data.extra_downsamples=[2]", "--train.epochs=1"]
    options = [f"--data.manifest={square_slides}", *shared, *scales, "--train.budget=16MiB"]
    assert main(["fit", *words, *options]) == 0
    assert "there is no estimate: the network reads values while it runs" in capsys.readouterr().out
    assert not (tmp_path / "run" / "estimate.json").exists()
    assert any((tmp_path / "run" / "checkpoints").glob("*.ckpt"))
