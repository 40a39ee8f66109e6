"""Runs of every kind of task, from the manifest's columns to scores."""

import csv
from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import read_predictions

TASKS = {
    "ordinal": ("{class_path: OrdinalTask, init_args: {classes: [low, mid, high]}}", "val_quadratic_kappa"),
    "several labels": ("{class_path: MultiLabelTask, init_args: {classes: [x, y]}}", "val_auc"),
    "number": ("{class_path: RegressionTask, init_args: {column: age}}", "val_mean_absolute_error"),
    "hazards": ("{class_path: HazardTask, init_args: {intervals: 2}}", "val_c_index"),
    "cox": ("{class_path: CoxTask, init_args: {memory: 4}}", "val_loss"),
}  # fmt: skip


@pytest.fixture
def table(square_slides: Path, tmp_path: Path) -> Path:
    """A manifest with the columns of every task."""
    path = tmp_path / "all.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "split", "site", "label", "x", "y", "age", "time", "event"])
        for i, record in enumerate(read_manifest(square_slides)):
            grade, event = ("low", "mid", "high")[i % 3], int(i % 4 != 3)
            row = [grade, i % 2, (i + 1) // 2 % 2, 40 + 3 * i, 1 + 1.5 * i, event]
            writer.writerow([record.path, record.split, "north" if i % 2 else "south", *row])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_trains_and_is_scored(name: str, table: Path, words: list[str], tmp_path: Path) -> None:
    task, monitor = TASKS[name]
    more = [f"--data.manifest={table}", f"--model.task={task}", f"--train.monitor={monitor}"]
    more += ["--train.epochs=1" if name == "number" else "--train.epochs=2"]
    tissue = (
        ["--model.pool_over=tissue", "--data.extra_downsamples=[2]", "--model.magnifications=2"]
        if name == "number"
        else []
    )
    tissue += ["--model.backbone.norm=batch", "--model.batchnorm_over=tissue"] if name == "number" else []
    budget = ["--train.budget=64MiB"] if name in ("number", "cox") else []
    assert main(["fit", *words, *more, *tissue, *budget, "--train.resamples=20"]) == 0
    folder = Run(tmp_path / "run")
    scores = read_json(folder.evaluation("test"))
    assert monitor == "val_loss" or monitor.removeprefix("val_") in scores["slide"]
    assert len(read_predictions(folder.predictions_file("test"))) == scores["slides"] == 2
    kept = read_manifest(folder.splits, columns=("age", "time", "event"))
    assert [record.others["age"] for record in kept] == [str(40 + 3 * i) for i in range(12)]
    assert main(["predict", str(folder.path), str(table)]) == 0
    with (folder.path / "cohorts" / "all" / "predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 12


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.task={class_path: HazardTask, init_args: {time: months}}"], "has no column 'months'"),
        (["--model.task={class_path: RegressionTask}"], "has label 'low', which is not a number"),
        (["--train.monitor=val_c_index"], "with BinaryTask it is one of val_loss, val_auc"),
        (["--data.extra_downsamples=[4]"], "has 1 further magnifications and model.magnifications is 1; set it to 2"),
        (["--train.loggers=[wandb]"], "pip install 'wsi-trainer[tracking]'"),
        (["--train.devices=2"], "which needs tile-by-tile execution"),
        (["--model.pretrained=absent.pt", "--model.task.classes=[low, mid]"], "none of the classes 'low', 'mid'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(
    table: Path, words: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--model.task=BinaryTask"] if "val_c_index" in more[0] or "classes" in more[-1] else []
    assert main(["fit", *words, f"--data.manifest={table}", *task, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
