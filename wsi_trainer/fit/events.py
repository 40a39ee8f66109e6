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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from wsi_trainer.fit.quiet import LOGGERS
from wsi_trainer.foreign import Unreadable, json_of, read_bytes
from wsi_trainer.stopping import Stopped

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
