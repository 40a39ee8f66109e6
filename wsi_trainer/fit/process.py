"""The process of a run: its status file, its log, and its end."""

from __future__ import annotations

import logging
import platform
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from wsi_trainer.errors import UserError, explain_full_disk
from wsi_trainer.io.display import CleanFormatter, clean
from wsi_trainer.io.files import write_json
from wsi_trainer.stopping import GRACE, Stopped, ends_at_once

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
    with ends_at_once(grace), explain_full_disk(run):
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
    """Of the training, from 0 to 1."""
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
    handler = _Warnings(file)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield file
    except Stopped:
        file.update(state="stopped")
        raise
    except BaseException as error:
        file.update(state="failed", last_error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST])
        raise
    else:
        file.update(state="done")
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)
