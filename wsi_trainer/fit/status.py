"""Status of a run: `status.json`, which its process keeps up to date, and the command that reads it."""

from __future__ import annotations

import json as json_format
import logging
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.folder import RunFolder
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import duration, format_bytes, listening, say
from wsi_trainer.io.files import as_written, read_json, write_json
from wsi_trainer.signals import Stopped

log = logging.getLogger("wsi_trainer")

LAST = 5
"""Warnings that are kept."""
LONGEST = 2000
"""Characters of a warning or an error."""


@dataclass(frozen=True)
class RunStatus:
    """One run, as its process last described it."""

    run: str
    state: str
    """`running`, `died` (its process is gone and did not say why), `elsewhere` (on another host, so that only the time
    of its last word tells), `waiting` (not begun), or an outcome: `done`, `stopped`, `failed`."""
    host: str | None = None
    pid: int | None = None
    created: float | None = None
    """When the system made the process, which tells it from a later one of this number."""
    user: str | None = None
    began: str | None = None
    heard: str | None = None
    """When the process last wrote."""
    silent_seconds: float | None = None
    """Seconds since then."""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    loss: float | None = None
    progress: float | None = None
    """Of the training, or of the predictions of a deployment, from 0 to 1."""
    seconds_left: float | None = None
    """Of the training, while it goes on."""
    memory: int | None = None
    device_memory: int | None = None
    scores: dict[str, float | None] | None = None
    last_error: str | None = None
    not_finite: int = 0
    """Losses that were no finite numbers; the log names the first ones."""
    first_lost: str | None = None
    """The operator and the tile that first made one."""
    warnings: Sequence[str] = ()
    """The last ones."""
    of: str = "training"
    """What goes on: `training`, or `predictions` of a deployment."""


class StatusFile:
    """Writes the file anew whenever something changes; the run goes on without it where the disk refuses it."""

    def __init__(self, path: Path) -> None:
        process = psutil.Process()
        self.path = path
        self.status = RunStatus(
            path.parent.resolve().name, "running", platform.node(), process.pid, process.create_time(),
            process.username(), _now(),
        )  # fmt: skip
        self._lock = threading.RLock()  # warnings come from any thread, and from here
        self._said = False

    def update(self, **fields: Any) -> None:
        """Change these fields of the status."""
        with self._lock:
            self.status = replace(self.status, heard=_now(), **fields)
            try:
                write_json(self.path, asdict(self.status))
            except OSError as error:
                if not self._said:
                    self._said = True
                    log.warning("the run goes on without an up-to-date %s: %s", self.path.name, error.strerror)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class _Warnings(logging.Handler):
    """Puts warnings of the libraries into the status."""

    def __init__(self, file: StatusFile) -> None:
        super().__init__(logging.WARNING)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.file.update(warnings=(*self.file.status.warnings, record.getMessage()[:LONGEST])[-LAST:])


@contextmanager
def recorded(path: Path) -> Iterator[StatusFile]:
    """In this context the status of a run is kept: who runs it, what warns, and how it ends."""
    file = StatusFile(path)
    file.update()
    try:
        with listening(_Warnings(file)):
            yield file
    except Stopped:
        file.update(state="stopped")
        raise
    except BaseException as error:
        file.update(state="failed", last_error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST])
        raise
    else:
        file.update(state="done")


COLOURS = {"running": "green", "done": "green", "failed": "bold red", "died": "bold red", "stopped": "yellow"}
LEFT = ("died", "done", "stopped", "failed")
"""States that nothing follows."""


def status(run: Path, json: bool = False, watch: bool = False, every: float = 10.0) -> int:
    """Say how far a run is: progress, time left, memory, who runs it, whether its process lives, the last error.

    It only reads status.json in the run's folder, so it may be asked from anywhere that sees the folder. The exit code
    is 1 where the run, or a fold, has failed or died.

    Args:
        run: the folder of a run or of a cross-validation, `--out` of `wsi-train fit`, or of a deployment
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
        parts.append(f"{one.progress:.0%} of the {one.of}")
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
        lines.append(f"loss {one.loss:.4g}")
    if one.memory is not None:
        device = (
            "" if one.device_memory is None else f"; steps have needed {format_bytes(one.device_memory)} of the device"
        )
        lines.append(f"memory {format_bytes(one.memory)}{device}")
    if one.scores:
        lines.append(", ".join(f"{k} {'not finite' if v is None else format(v, '.4g')}" for k, v in one.scores.items()))
    if one.not_finite:
        first = "" if one.first_lost is None else f"; {one.first_lost}"
        lines.append(f"{one.not_finite} losses were not finite: the log names slides and steps{first}")
    lines += [f"warning: {text}" for text in one.warnings]
    if one.last_error is not None:
        lines.append(f"error: {one.last_error}")
    if one.state in ("died", "stopped", "failed"):
        again = "fit ... --resume last`" if one.of == "training" else "deploy ...`, with the same words"
        lines.append(f"continue it with `wsi-train {again}")
    return lines


def status_of(path: Path) -> list[RunStatus]:
    """The run, or the deployment, in this folder; of a study, one for each of its runs."""
    if (study := Study.at(path)) is not None:
        return [one for name, run in study.runs.items() for one in statuses_in(run.path, name)]
    status = one_status(path, path.resolve().name)
    if (deployment := Deployment.at(path)) is not None:
        return [replace(status, progress=deployment.progress, of="predictions of the members")]
    if status.state == "waiting":
        RunFolder(path).existing()
        raise UserError(f"{path} has no {RunFolder(path).status.name}: it is of an older version, or it has not begun")
    return [status]


def statuses_in(path: Path, name: str) -> list[RunStatus]:
    """The status of a run of a study, or of the folds that it is."""
    if (folds := Study.at(path)) is None:
        return [one_status(path, name)]
    return [one_status(run.path, f"{name}, {fold}") for fold, run in folds.runs.items()]


def one_status(path: Path, name: str) -> RunStatus:
    """The status of the process that wrote to this folder last."""
    file = RunFolder(path).status
    if not file.is_file():
        return RunStatus(name, "waiting")
    with as_written(file):
        one = RunStatus(**read_json(file))
        state = alive(one) if one.state == "running" else one.state
        silent = (datetime.now(UTC) - datetime.fromisoformat(str(one.heard))).total_seconds()
        left = None if state in LEFT else one.seconds_left
        return replace(one, run=name, state=state, silent_seconds=max(silent, 0.0), seconds_left=left)


def alive(one: RunStatus) -> str:
    """State of the process: a number is given again after a while, the moment of its beginning is not."""
    if one.host != platform.node():
        return "elsewhere"
    try:
        process = psutil.Process(one.pid)
        same = one.created is not None and abs(process.create_time() - one.created) < 2
        return "running" if same and process.status() != psutil.STATUS_ZOMBIE else "died"
    except psutil.NoSuchProcess:
        return "died"
