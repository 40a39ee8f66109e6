"""The structured log of a run survives kills and stays small, and `status` says what became of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.events import EventLog, older, read_events, recorded
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.status import status_of
from wsi_trainer.models import SlideClassifier
from wsi_trainer.stopping import Stopped


def test_a_torn_record_is_passed_over_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("checkpoint", step=1)
    with path.open("ab") as file:
        file.write(b'{"schema": 1, "event": "chec')
    EventLog(path).write("checkpoint", step=2)
    assert [record["step"] for record in read_events(path)] == [1, 2]


def test_the_log_is_bounded_and_keeps_what_the_run_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, limit=2000)
    events.write("start", version="1", host="h", pid=1, created=0.0, user="u", resume=None)
    for step in range(500):
        events.write("checkpoint", step=step)
    assert path.stat().st_size <= 2300 and older(path).stat().st_size <= 2300
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["event"] == "start" and lines[-1]["step"] == 499
    assert not [file for file in tmp_path.iterdir() if file not in (path, older(path))]


def test_a_log_that_cannot_be_opened_anew_closes_no_descriptor_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, limit=200)
    for step in range(3):
        events.write("checkpoint", step=step)
    replace = os.replace

    def taken(source: Path, target: Path) -> None:
        replace(source, target)
        path.mkdir()  # what another program may do meanwhile

    monkeypatch.setattr(os, "replace", taken)
    events.write("checkpoint", step=3)
    assert "Is a directory" in caplog.text and "Bad file descriptor" not in caplog.text


def test_numbers_that_are_not_finite_are_json_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("epoch", scores={"val_loss": float("nan")}, step=1)
    assert read_events(path)[0]["scores"] == {"val_loss": "nan"}


def test_a_disk_that_refuses_a_record_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "events.jsonl"
    events = EventLog(path)
    events.write("start", version="1")
    events.write("checkpoint", step=1)
    events.write("checkpoint", step=2)
    assert [record.getMessage() for record in caplog.records].count(
        "the run goes on without what events.jsonl should say now: No such file or directory"
    ) == 1
    path.parent.mkdir()
    for step in (3, 4):
        events.write("checkpoint", step=step)
    assert [(one["event"], one.get("step")) for one in read_events(path)] == [
        ("start", None), ("checkpoint", 3), ("checkpoint", 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "done"), (Stopped(15), "stopped"), (ValueError("it\nbroke"), "failed")]
)
def test_the_end_of_a_run_is_told(tmp_path: Path, error: BaseException | None, outcome: str) -> None:
    folder = Run(tmp_path)
    try:
        with recorded(folder.events, "1", None):
            assert status_of(tmp_path)[0].state == "running"
            if error is not None:
                raise error
    except (ValueError, Stopped) as raised:
        assert raised is error
    (said,) = status_of(tmp_path)
    assert said.state == outcome and said.pid == os.getpid()
    assert said.last_error == ("ValueError: it broke" if outcome == "failed" else None)


def test_a_killed_process_has_died_and_one_on_another_host_is_elsewhere(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from wsi_trainer.fit.events import recorded
with recorded(Path({str(tmp_path / "events.jsonl")!r}), "1", None):
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert status_of(tmp_path)[0].state == "died"
    assert main(["status", str(tmp_path), "--watch"]) == 1, "nothing is waited for"
    record = json.loads((tmp_path / "events.jsonl").read_text()) | {"host": "another"}
    (tmp_path / "events.jsonl").write_text(json.dumps(record) + "\n")
    assert status_of(tmp_path)[0].state == "elsewhere"


def test_time_left_goes_by_what_this_process_has_done(tmp_path: Path) -> None:
    path = Run(tmp_path).events
    with recorded(path, "1", "last"):
        pass
    start = read_events(path)[0]
    rows: list[dict[str, Any]] = [
        start,
        start | {"event": "train", "seconds": 10.0, "epochs": 4, "batches": 25, "done": 50},
        start | {"event": "step", "seconds": 40.0, "done": 60, "epoch": 2, "step": 60, "loss": 0.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (said,) = status_of(tmp_path)
    assert said.progress == pytest.approx(0.6) and said.seconds_left == pytest.approx(3.0 * 40)


def test_a_folder_without_a_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


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
    records = read_events(folder.events)
    assert next((r["slide"], r["loss"]) for r in records if r["event"] == "loss") == (spoilt[0], "inf")
    assert any(spoilt[0] in r["text"] and "step 1" in r["text"] for r in records if r["event"] == "warning")
    capsys.readouterr()
    main(["status", str(folder.path), "--json"])
    (said,) = json.loads(capsys.readouterr().out)["runs"]
    assert said["not_finite"] >= 1 and said["epochs"] == 1
    assert said["state"] == "failed" and "after step 8" in said["last_error"]
    validated = [record.slide for record in read_manifest(folder.splits) if record.split == "val"]
    assert any(f"the prediction of slide {slide} is" in said["last_error"] for slide in validated)
    assert {"start", "train", "step", "end"} <= {r["event"] for r in records}


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
    with recorded(Run(tmp_path / "fold0").events, "1", None):
        said = status_of(tmp_path)
    assert [one.run for one in said] == [f"fold{number}" for number in range(11)]
    assert [one.state for one in said] == ["running"] + ["waiting"] * 10
