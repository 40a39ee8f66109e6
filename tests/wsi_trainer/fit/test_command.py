"""`wsi-train fit`, `validate`, `test` and `predict` through the command line."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.folder import read_curves
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import ClassPredictions, auc


def test_a_run_folder_holds_everything_and_the_other_commands_read_it(
    words: list[str], manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words]) == 0
    folder = Run(tmp_path / "run").existing()
    splits = read_manifest(folder.splits)
    assert len(splits) == 16 and {record.split for record in splits} == {"train", "val", "test"}
    curves = read_curves(folder.metrics)
    assert len(curves["train_loss"]) == len(curves["val_loss"]) == len(curves["val_auc"]) == 3
    assert read_json(folder.environment)["packages"]["torch"]
    assert read_json(folder.memory)["plain_bytes"] > 16 * 256 * 100
    assert folder.checkpoint("best").is_file() and folder.checkpoint("last").is_file()
    predictions = ClassPredictions.read(folder.predictions_file("test"))
    assert set(predictions.slides) == {record.slide for record in splits if record.split == "test"}
    scores = read_json(folder.evaluation("test"))
    assert scores["slide"]["auc"]["value"] == auc(predictions)
    assert "auc" in capsys.readouterr().out

    again = [str(folder.path)]
    first = folder.predictions_file("test").read_bytes()
    assert main(["test", *again]) == 2
    assert "evaluation/test.json is there already; give --overwrite" in capsys.readouterr().err
    assert main(["test", *again, "--overwrite"]) == 0
    assert folder.predictions_file("test").read_bytes() == first
    assert main(["validate", *again, "--checkpoint=last"]) == 0
    assert read_json(Run.open(folder.path, "last").evaluation("val"))["checkpoint"] == "last"
    _predict_without_labels(again, folder, splits[0].path, predictions, tmp_path)


def _predict_without_labels(
    again: list[str], folder: Run, slide: Path, known: ClassPredictions, tmp_path: Path
) -> None:
    unlabelled = tmp_path / "new.csv"
    unlabelled.write_text("slide\n" + "\n".join(str(slide.parent / Path(name).name) for name in known.slides))
    assert main(["predict", *again, str(unlabelled)]) == 0
    with (folder.path / "cohorts" / "new" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert "label" not in rows[0]
    values = [float(row["probability_1"]) for row in rows]
    assert values == known.probabilities[:, 1].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.learning_rat=1", "learning_rat"),
        ("--train.epochs=none", "train.epochs"),
        ("--train.epochs=0", "train.epochs is 0; it must be 1 or more"),
        ("--train.monitor=accuracy", "val_auc"),
        ("--data.manifest=absent.csv", "there is no manifest at absent.csv"),
        (
            "--model.task={class_path: BinaryTask, init_args: {classes: [a, b]}}",
            "none of the classes 'a', 'b'",
        ),
        ("--model.learning_rate=.nan", "model.learning_rate is nan; give a finite number"),
        ("--data.stain=.inf", "data.stain is inf; give a finite number"),
        ("--model.backbone.stem_stride=0", "stem_stride is 0; it must be 1 or more"),
        ("--model.backbone.convs=0", "convs is 0; it must be 1 or more"),
        (
            "--model.backbone.widths=[4,1000000000]",
            "error: memory is short: 144,000,000,000 bytes were asked for at once",
        ),
        ("--model.backbone.widths=[4,4000000000000000000]", "error: the network of model cannot be built: "),
        ("--model.task={class_path: BinaryTask, init_args: {classes: null}}", "classes is None; give at least two"),
    ],
)
def test_a_mistake_ends_with_one_line(
    words: list[str], change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error


def test_another_network_and_weights_that_are_no_numbers_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = [*words, "--train.epochs=1"]
    assert main(["fit", *once]) == 0
    run = Run(tmp_path / "run")
    known = torch.load(run.checkpoint("last"), weights_only=False)
    weights = {
        name: value * math.nan if name.endswith("weight") else value for name, value in known["state_dict"].items()
    }
    torch.save(known | {"state_dict": weights}, tmp_path / "nan.ckpt")
    other = [
        *once,
        f"--out={tmp_path / 'other'}",
        f"--resume={run.checkpoint('last')}",
        "--model.backbone.widths=[8,8]",
    ]
    for command, said in (
        (["fit", *other], "holds the weights of another network than the config's"),
        (["fit", *once, f"--resume={tmp_path / 'nan.ckpt'}"], "is NaN: the training that wrote it had diverged"),
        (["predict", str(run.path), str(run.kept()[0].path), f"--checkpoint={tmp_path / 'nan.ckpt'}"], "is NaN: "),
        (["export", str(run.path), f"--file={tmp_path / 'w.pt'}", f"--checkpoint={tmp_path / 'nan.ckpt'}"], "is NaN: "),
    ):
        capsys.readouterr()
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not run.cohorts


def test_a_second_run_does_not_overwrite_the_first(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words, "--train.epochs=1", "--data.manifest=absent.csv"]) == 2
    assert (tmp_path / "run" / "config.yaml").is_file()  # nothing was trained: the same folder will do
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "best.ckpt").touch()
    capsys.readouterr()
    assert main(["fit", *words]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["test", str(tmp_path / "other")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_missing_checkpoint_is_named(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("data: {manifest: m.csv}\n")
    assert main(["test", str(tmp_path / "run")]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_keeps_what_is_null(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that was turned off stays off in every later command."""
    run = tmp_path / "run"
    assert main(["fit", *words, "--train.patience=2", "--train.epochs=1"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["budget"] is None
    assert Run.open(run).loaded.train.budget is None
    capsys.readouterr()
    assert main(["fit", str(run), "--train.patience=null", "--train.epochs=2"]) == 0
    said = capsys.readouterr().out
    assert "train.patience was 2 and is None from now on" in said and "train.budget was" not in said
    for _ in range(2):
        assert main(["test", str(run), "--overwrite"]) == 0
        assert Run.open(run).loaded.train.patience is None


# -- splits in which all slides are of one class: a mistake of the table that scores hide


def with_labels(manifest: Path, target: Path, label: Callable[[str, int], str]) -> Path:
    """The manifest with other labels, by split and row."""
    with manifest.open() as file:
        rows = list(csv.DictReader(file))
    for index, row in enumerate(rows):
        row["label"] = label(row["split"], index)
        row["slide"] = str(manifest.parent / row["slide"])
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return target


def one_to_train(split: str, row: int) -> str:
    return "1" if split == "train" else str(row % 2)


def one_to_test(split: str, row: int) -> str:
    return str(row % 2) if split == "train" else "0"


def test_a_split_of_one_class_is_refused_or_named(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = with_labels(square_slides, tmp_path / "only.csv", one_to_train)
    assert main(["fit", *words, f"--data.manifest={only}"]) == 2
    assert "the split train has slides of the class '1' only: nothing can be learnt" in capsys.readouterr().err
    held = with_labels(square_slides, tmp_path / "held.csv", one_to_test)
    assert main(["fit", *words, f"--data.manifest={held}", "--train.epochs=1"]) == 0
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "the split test has slides of the class '0' only" in text
    shown = " ".join(capsys.readouterr().out.split())
    assert "auc not defined" in shown and "(no interval: 2 patients, of 10 needed)" in shown


# -- weights & Biases and MLflow, where they are installed: both write into the run's folder and need no server


@pytest.fixture
def options(words: list[str], square_slides: Path) -> list[str]:
    return ["fit", *words, f"--data.manifest={square_slides}", "--train.epochs=2", "--train.resamples=5"]


def test_mlflow_keeps_every_score(options: list[str], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    assert main([*options, "--train.loggers=[mlflow]"]) == 0
    folder = Run(tmp_path / "run")
    client = mlflow.MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("wsi-train")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(found.info.run_id, "train_loss")] == [5, 11]
    assert found.data.params["train/epochs"] == "2"
    assert {"val_loss", "val_auc", "train_loss_step"} <= set(found.data.metrics)


def test_wandb_writes_offline(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main([*options, "--train.loggers=[wandb]"]) == 0
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    said = written.read_bytes()
    assert b"train_loss" in said and b"val_auc" in said
