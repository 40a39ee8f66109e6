"""`wsi-train fit`, `validate`, `test` and `predict` through the command line."""

import csv
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.loggers import TensorBoardLogger

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.fit.trainer import Bar, make_trainer
from wsi_trainer.metrics import ClassPredictions, auc
from wsi_trainer.report.contents import read_curves


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
    predictions = ClassPredictions.read(folder.predictions("test"))
    assert set(predictions.slides) == {record.slide for record in splits if record.split == "test"}
    scores = read_json(folder.evaluation("test"))
    assert scores["slide"]["auc"]["value"] == auc(predictions)
    assert "auc" in capsys.readouterr().out

    again = [str(folder.path)]
    first = folder.predictions("test").read_bytes()
    assert main(["test", *again]) == 2
    assert "evaluation/test.json is there already; give --overwrite" in capsys.readouterr().err
    assert main(["test", *again, "--overwrite"]) == 0
    assert folder.predictions("test").read_bytes() == first
    assert main(["validate", *again, "--checkpoint=last"]) == 0
    assert read_json(folder.evaluation("val"))["checkpoint"] == "last"
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
    ],
)
def test_a_mistake_ends_with_one_line(
    words: list[str], change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error


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


def test_the_progress_bar_names_no_version(tmp_path: Path) -> None:
    """The bar showed the last letters of the folder `tensorboard` as a number of a version."""
    bar, curves = Bar(), TensorBoardLogger(tmp_path, name="", version="tensorboard")
    trainer = make_trainer(TrainConfig(budget=None, accelerator="cpu"), tmp_path, [bar], [curves])
    assert "v_num" in RichProgressBar().get_metrics(trainer, pl.LightningModule())
    assert "v_num" not in bar.get_metrics(trainer, pl.LightningModule())


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
