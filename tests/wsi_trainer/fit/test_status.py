"""A run keeps its status up to date, and `status` says what became of the run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.warm import start
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.status import recorded, status_of
from wsi_trainer.models import SlideClassifier
from wsi_trainer.signals import Stopped


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "done"), (Stopped(15), "stopped"), (ValueError("it\nbroke"), "failed")]
)
def test_the_end_of_a_run_is_told(tmp_path: Path, error: BaseException | None, outcome: str) -> None:
    folder = Run(tmp_path)
    try:
        with recorded(folder.status):
            assert status_of(tmp_path)[0].state == "running"
            if error is not None:
                raise error
    except (ValueError, Stopped) as raised:
        assert raised is error
    (said,) = status_of(tmp_path)
    assert said.state == outcome and said.pid == os.getpid()
    assert said.last_error == ("ValueError: it broke" if outcome == "failed" else None)


def killed(path: Path) -> None:
    with recorded(path):
        os.kill(os.getpid(), 9)


def test_a_killed_process_has_died_and_one_on_another_host_is_elsewhere(tmp_path: Path) -> None:
    start(tmp_path / "log", killed, tmp_path / "status.json").join()
    assert status_of(tmp_path)[0].state == "died"
    assert main(["status", str(tmp_path), "--watch"]) == 1, "nothing is waited for"
    record = json.loads((tmp_path / "status.json").read_text()) | {"host": "another"}
    (tmp_path / "status.json").write_text(json.dumps(record))
    assert status_of(tmp_path)[0].state == "elsewhere"


def test_a_damaged_status_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", '{"run": "x"}', '{"run": "x", "state": "done", "heard": null}', '{"unknown": 1}'):
        Run(tmp_path).status.write_text(text)
        assert main(["status", str(tmp_path)]) == 2
        assert "status.json" in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_a_run_is_told_of_and_a_loss_that_is_not_finite_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = SlideClassifier._loss
    spoilt: list[str] = []

    def loss(self: SlideClassifier, batch: Any, *rest: Any) -> Tensor:
        value = right(self, batch, *rest)
        if self.training and not spoilt:
            spoilt.append(batch["slide"])
            return value * torch.tensor(float("inf"))
        return value

    monkeypatch.setattr(SlideClassifier, "_loss", loss)
    assert main(["fit", *words, "--train.epochs=1"]) == 2, "scores of such predictions are refused"
    folder = Run(tmp_path / "run")
    named = f"the loss of slide {spoilt[0]} is inf (epoch 0, batch 0, step 1)"
    assert named in folder.log.read_text()
    capsys.readouterr()
    main(["status", str(folder.path), "--json"])
    (said,) = json.loads(capsys.readouterr().out)["runs"]
    assert said["not_finite"] >= 1 and said["epochs"] == 1
    assert said["state"] == "failed" and "after step 8" in said["last_error"]
    validated = [record.slide for record in read_manifest(folder.splits) if record.split == "val"]
    assert any(f"the prediction of slide {slide} is" in said["last_error"] for slide in validated)
    assert any(text.startswith(named) for text in said["warnings"])


def test_a_run_that_went_well_is_done(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *words, "--train.epochs=2"]) == 0
    capsys.readouterr()
    assert main(["status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("done run, 100% of the training, epoch 2 of 2, step 16")
    assert "val_loss" in shown and "memory" in shown and "not finite" not in shown


def test_a_cross_validation_says_each_fold(tmp_path: Path) -> None:
    (tmp_path / "folds").mkdir()
    for number in range(11):
        (tmp_path / "folds" / f"fold{number}.csv").touch()
    (tmp_path / "fold0").mkdir()
    with recorded(Run(tmp_path / "fold0").status):
        said = status_of(tmp_path)
    assert [one.run for one in said] == [f"fold{number}" for number in range(11)]
    assert [one.state for one in said] == ["running"] + ["waiting"] * 10
