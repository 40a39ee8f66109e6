"""What the log of a run says of it: how far it is, whether its process lives, and what went wrong last."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from wsi_trainer.errors import UserError
from wsi_trainer.fit.events import OUTCOMES, read_events
from wsi_trainer.fit.run_folder import RunFolder, as_written

LAST = 5
"""Warnings that are shown."""


@dataclass(frozen=True)
class RunStatus:
    """One run, as its log has it."""

    run: str
    state: str
    """`running`, `died` (its process is gone and did not say why), `elsewhere` (on another host, so that only the age
    of its last record tells), `waiting` (not begun), or an outcome: `done`, `stopped`, `failed`."""
    host: str | None = None
    pid: int | None = None
    user: str | None = None
    began: str | None = None
    silent_seconds: float | None = None
    """Since the last record."""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    loss: float | str | None = None
    progress: float | None = None
    """Of the training, from 0 to 1."""
    seconds_left: float | None = None
    """Of the training, while it goes on."""
    memory: int | None = None
    device_memory: int | None = None
    scores: dict[str, Any] | None = None
    last_error: str | None = None
    not_finite: int = 0
    first_lost: str | None = None
    """Losses that were no finite numbers and are named in the log."""
    warnings: tuple[str, ...] = ()


def status_of(path: Path) -> list[RunStatus]:
    """The run in this folder; of a cross-validation, one for each fold."""
    folds = sorted((path / "folds").glob("fold*.csv"), key=lambda fold: (len(fold.stem), fold.stem))
    if folds:
        return [one_status(path / fold.stem, fold.stem) for fold in folds]
    status = one_status(path, path.resolve().name)
    if status.state == "waiting":
        RunFolder(path).existing()
        raise UserError(f"{path} has no {RunFolder(path).events.name}: it is of an older version, or it has not begun")
    return [status]


def one_status(path: Path, name: str) -> RunStatus:
    """The status of the process that wrote to this folder last."""
    file = RunFolder(path).events
    with as_written(file):
        records = read_events(file)
        starts = [place for place, record in enumerate(records) if record["event"] == "start"]
        if not starts:
            return RunStatus(name, "waiting")
        return _of_process(name, records[starts[-1] :])


def _of_process(name: str, records: list[dict[str, Any]]) -> RunStatus:
    start, last = records[0], records[-1]

    def latest(event: str) -> dict[str, Any]:
        return next((record for record in reversed(records) if record["event"] == event), {})

    train, step, epoch, error = (latest(event) for event in ("train", "step", "epoch", "error"))
    state = latest("end").get("outcome") or alive(start)
    furthest = max((record for record in records if "done" in record), key=lambda record: record["done"], default={})
    progress = _progress(train, furthest) if not latest("trained") else 1.0
    return RunStatus(
        run=name,
        state=state,
        host=start["host"],
        pid=start["pid"],
        user=start["user"],
        began=start["time"],
        silent_seconds=max((datetime.now(UTC) - datetime.fromisoformat(last["time"])).total_seconds(), 0.0),
        epoch=furthest.get("epoch"),
        epochs=train.get("epochs"),
        step=next((record["step"] for record in reversed(records) if "step" in record), None),
        loss=step.get("loss"),
        progress=progress,
        seconds_left=None if state in OUTCOMES or state == "died" else _left(train, furthest, progress),
        memory=step.get("memory"),
        device_memory=step.get("device_memory"),
        scores=epoch.get("scores"),
        last_error=f"{error['kind']}: {error['text']}" if error else None,
        not_finite=sum(record["event"] == "loss" for record in records),
        first_lost=next(
            (found for record in records if record["event"] == "loss" and (found := record.get("first"))), None
        ),
        warnings=tuple(record["text"] for record in records if record["event"] == "warning")[-LAST:],
    )


def alive(start: dict[str, Any]) -> str:
    """Whether the process lives: a number is given again after a while, the moment of its beginning is not."""
    if start["host"] != platform.node():
        return "elsewhere"
    try:
        process = psutil.Process(start["pid"])
        same = abs(process.create_time() - start["created"]) < 2
        return "running" if same and process.status() != psutil.STATUS_ZOMBIE else "died"
    except psutil.NoSuchProcess:
        return "died"


def _progress(train: dict[str, Any], furthest: dict[str, Any]) -> float | None:
    total = (train.get("epochs") or 0) * train.get("batches", 0)
    return min(furthest["done"] / total, 1.0) if total > 0 else None


def _left(train: dict[str, Any], furthest: dict[str, Any], progress: float | None) -> float | None:
    """By the time that this process took for what it has done, validation included."""
    if progress is None or furthest["done"] <= train["done"]:
        return 0.0 if progress == 1.0 else None
    spent, done = furthest["seconds"] - train["seconds"], furthest["done"] - train["done"]
    return float(max(spent / done * (train["epochs"] * train["batches"] - furthest["done"]), 0.0))
