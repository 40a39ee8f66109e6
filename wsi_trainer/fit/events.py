"""The structured log of a run: one JSON object a line, in a file of bounded size that a kill cannot spoil.

Each record has `schema`, `time` (UTC), `seconds` (since the process began to write, by a clock that nobody sets) and
`event`, one of `EVENTS`, with the fields named there. A record is one write at the end of the file, so that a killed
process leaves at most one torn line, which readers pass over and writers close. A file that has grown to `LIMIT`
becomes the older of two; records that say what the run is are repeated at the head of the new one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from wsi_trainer.errors import UserError, naming_disks
from wsi_trainer.io.display import CleanFormatter, clean
from wsi_trainer.io.untrusted import Unreadable, json_of, read_bytes
from wsi_trainer.stopping import GRACE, Stopped, ends_at_once

SCHEMA = 1
LIMIT = 4 << 20
"""Bytes of each of the two files."""
LONGEST = 2000
"""Characters of a text."""
EVENTS = {
    "start": ("version", "host", "pid", "created", "user", "resume"),
    "train": ("epochs", "batches", "done"),
    "step": ("epoch", "batch", "step", "done", "slide", "loss", "memory", "device_memory"),
    "epoch": ("epoch", "step", "done", "scores"),
    "checkpoint": ("step",),
    "loss": ("step", "slide", "loss", "first"),
    "warning": ("text",),
    "trained": ("step",),
    "error": ("kind", "text"),
    "end": ("outcome",),
}
"""The fields of each event."""
HEAD = ("start", "train")
"""Events that say what the run is."""
OUTCOMES = ("done", "stopped", "failed")

log = logging.getLogger("wsi_trainer")
LOGGERS = ("pytorch_lightning", "lightning_fabric", "wsi_trainer", "lightning_plugin")
_KNOWN = (
    ".*does not have many workers.*",  # one slide is read while the step computes: workers would not help
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning and torch, not the user, have to settle this
    ".*estimate number of stepping batches.*",
    ".*exists and is not empty.*",
    ".*deprecated in v4.49.0.*",
    ".*recommended to use `self.log.*sync_dist.*",  # every device computes the scores of all slides
    ".*`training_step` returned `None`.*",  # a slide was left out, which is said in other words
)


class EventLog:
    """Appends records; a disk that refuses one has not ended the run, nor the log: that is said once, and records that
    say what the run is come with the next one that is written."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path, self.limit = path, limit
        self._head: dict[str, dict[str, Any]] = {}
        self._began = time.monotonic()
        self._owed: list[dict[str, Any]] = []
        self._said = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one record of this event."""
        assert set(fields) <= set(EVENTS[event]), (event, fields)
        record = {
            "schema": SCHEMA,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.monotonic() - self._began, 3),
            "event": event,
        } | {name: _plain(value) for name, value in fields.items()}
        if event in HEAD:
            self._head[event] = record
        try:
            self._append(record)
            self._owed = []
        except OSError as error:
            self._owed += [record] if event in HEAD else []
            if not self._said:
                self._said = True
                log.warning("the run goes on without what %s should say now: %s", self.path.name, error.strerror)

    def _append(self, record: dict[str, Any]) -> None:
        line = b"".join(map(_line, [*self._owed, record]))
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(line) > self.limit:
            os.replace(self.path, older(self.path))
            line = b"".join(_line(one) for one in self._head.values() if one is not record) + line
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line  # the process before this one was killed within a record
            while line:
                line = line[os.write(file.fileno(), line) :]


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A value that JSON has: numbers that are not finite as texts, as in the configs."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return value[:LONGEST] if isinstance(value, str) else value


def older(path: Path) -> Path:
    """The file that held the records before."""
    return path.with_suffix(f".older{path.suffix}")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All records that are whole, and of this schema."""
    records = []
    for file in (older(path), path):
        for line in read_bytes(file).splitlines() if file.is_file() else ():
            try:
                record = json_of(line, file)
            except Unreadable:
                continue  # torn by a kill
            if isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("event") in EVENTS:
                records.append(record)
    return records


class _Warnings(logging.Handler):
    """Puts warnings of the libraries into the log."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.events.write("warning", text=record.getMessage())


@contextmanager
def recorded(path: Path, version: str, resume: str | None) -> Iterator[EventLog]:
    """In this context a run is written down: who runs it, what warns, and how it ends."""
    events = EventLog(path)
    process = psutil.Process()
    events.write(
        "start", version=version, host=platform.node(), pid=process.pid, created=process.create_time(),
        user=process.username(), resume=resume,
    )  # fmt: skip
    handler = _Warnings(events)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield events
    except BaseException as error:
        stopped = isinstance(error, Stopped)
        if not stopped:
            events.write("error", kind=type(error).__name__, text=" ".join(str(error).split()))
        events.write("end", outcome="stopped" if stopped else "failed")
        raise
    else:
        events.write("end", outcome="done")
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)


class LogFile(logging.FileHandler):
    """The log of a run; where it cannot be written the run goes on without it, and says so once."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.setLevel(logging.CRITICAL + 1)
        said = clean(f"wsi-train: warning: the run goes on without {self.baseFilename}: {error.strerror}")
        print(said, file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # of what could not be written: that was said
            self.stream = None  # type: ignore[assignment]  # closed all the same


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """In this context Lightning's messages go to a file; only warnings also go to the console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(CleanFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    consoles = [(h, h.level) for logger in loggers for h in logger.handlers]
    for console, _ in consoles:
        console.setLevel(logging.WARNING)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            for message in _KNOWN:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        for console, level in consoles:
            console.setLevel(level)
        handler.close()


@contextmanager
def at_work(run: Path, grace: float = GRACE) -> Iterator[None]:
    """In this context signals end the command soon, and a full disk or a killed reader of slides is one clear error.

    Args:
        run: The folder whose disk is named where it is full.
        grace: Seconds to unwind after a signal. Lightning alone would finish the step, and end as if all were well.
    """
    with ends_at_once(grace), naming_disks(run):
        try:
            yield
        except SystemExit as stop:
            if isinstance(stop.__context__, Stopped):
                raise stop.__context__ from None
            raise
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(
                "a process that opens slides ahead (data.workers) has ended: it was killed, or memory is short; "
                "try data.workers 0"
            ) from error
