"""The command `status`: how far a run is that goes on elsewhere, has ended, or has died; all of it from its log."""

from __future__ import annotations

import json as json_format
import platform
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.events import OUTCOMES, read_events
from wsi_trainer.fit.run import Run, as_written
from wsi_trainer.io.display import duration, format_bytes, say

LAST = 5
"""Warnings that are shown."""
COLOURS = {"running": "green", "done": "green", "failed": "bold red", "died": "bold red", "stopped": "yellow"}
LEFT = {"died", *OUTCOMES}
"""States that nothing follows."""


def status(run: Path, json: bool = False, watch: bool = False, every: float = 10.0) -> int:
    """Say how far a run is: progress, time left, memory, who runs it, whether its process lives, the last error.

    It only reads the log in the run's folder, so it may be asked from anywhere that sees the folder. The exit code is
    1 where the run, or a fold, has failed or died.

    Args:
        run: the folder of a run or of a cross-validation, `--out` of `wsi-train fit`
        json: print JSON, one line each time
        watch: say it again and again until the run has ended
        every: with `watch`, seconds between two looks
    """
    if not 0 < every < 86400:
        raise UserError(f"--every is {every}; expected seconds, above 0 and below a day")
    console = Console()
    while True:
        found = status_of(run)
        if json:
            print(json_format.dumps({"schema": 1, "runs": [asdict(one) for one in found]}), flush=True)
        else:
            for one in found:
                show(one, console)
        if not watch or all(one.state in LEFT for one in found):
            return int(any(one.state in ("failed", "died") for one in found))
        time.sleep(every)


def show(one: RunStatus, console: Console) -> None:
    """One run in a few lines."""
    say(console, headline(one), lead=one.state, lead_style=COLOURS.get(one.state, "bold"))
    for line in details(one):
        say(console, f"  {line}")


def headline(one: RunStatus) -> str:
    """Name, progress and time left."""
    parts = [one.run]
    if one.progress is not None:
        parts.append(f"{one.progress:.0%} of the training")
    if one.epoch is not None and one.epochs:
        parts.append(f"epoch {one.epoch + 1} of {one.epochs}")
    if one.step is not None:
        parts.append(f"step {one.step}")
    if one.seconds_left is not None:
        parts.append(f"about {duration(one.seconds_left)} left")
    return ", ".join(parts)


def details(one: RunStatus) -> list[str]:
    """Everything else that is known, a line each."""
    lines = []
    if one.host is not None:
        silent = f", last heard of {duration(one.silent_seconds)} ago" if one.silent_seconds is not None else ""
        lines.append(f"process {one.pid} of {one.user} on {one.host}, since {one.began}{silent}")
    if one.loss is not None:
        lines.append(f"loss {one.loss if isinstance(one.loss, str) else format(one.loss, '.4g')}")
    if one.memory is not None:
        device = (
            "" if one.device_memory is None else f"; steps have needed {format_bytes(one.device_memory)} of the device"
        )
        lines.append(f"memory {format_bytes(one.memory)}{device}")
    if one.scores:
        lines.append(", ".join(f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in one.scores.items()))
    if one.not_finite:
        first = "" if one.first_lost is None else f"; {one.first_lost}"
        lines.append(f"{one.not_finite} losses were not finite: the log names slides and steps{first}")
    lines += [f"warning: {text}" for text in one.warnings]
    if one.last_error is not None:
        lines.append(f"error: {one.last_error}")
    if one.state in ("died", "stopped", "failed"):
        lines.append("continue it with `wsi-train fit ... --resume last`")
    return lines


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
    if status.state == "waiting" and (path / "comparison.json").is_file():
        parts = (path / name for name in ("run", "frozen", "thumbnail"))
        return [one_status(part, part.name) for part in parts if part.is_dir()]
    if status.state == "waiting":
        Run(path).existing()
        raise UserError(f"{path} has no {Run(path).events.name}: it is of an older version, or it has not begun")
    return [status]


def one_status(path: Path, name: str) -> RunStatus:
    """The status of the process that wrote to this folder last."""
    file = Run(path).events
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
