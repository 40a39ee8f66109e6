"""Weights & Biases and MLflow, where they are installed: both write into the run's folder and need no server."""

from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run


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
