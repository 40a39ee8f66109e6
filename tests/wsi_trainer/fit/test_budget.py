"""A run within a budget is the run without one: same losses, same predictions."""

import csv
from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.metrics import ClassPredictions
from wsi_trainer.report.contents import read_curves


def losses(folder: Run) -> list[float]:
    """The loss of every step."""
    with (folder.metrics / "version_0" / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]]


def test_losses_and_predictions_are_those_of_plain_pytorch(
    square_slides: Path, words: list[str], tmp_path: Path
) -> None:
    common = [*words, f"--data.manifest={square_slides}", "--train.precision=64-true", "--train.epochs=4"]
    assert main(["fit", *common]) == 0
    assert main(["fit", *common, f"--out={tmp_path / 'tiled'}", "--train.budget=3MiB"]) == 0
    plain, tiled = Run(tmp_path / "run"), Run(tmp_path / "tiled")
    curves = [read_curves(folder.metrics) for folder in (plain, tiled)]
    assert curves[0].keys() == curves[1].keys()
    for column in ("train_loss", "val_loss"):
        np.testing.assert_allclose(curves[1][column], curves[0][column], rtol=1e-8, err_msg=column)
    steps = [losses(folder) for folder in (plain, tiled)]
    assert len(steps[0]) >= 20 and steps[0][0] != steps[0][-1]
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-8)
    predictions = [ClassPredictions.read(folder.predictions("test")) for folder in (plain, tiled)]
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
