"""The process of a run: where the messages of the libraries go, and how it ends."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_trainer.errors import UserError, naming_disks
from wsi_trainer.io.display import CleanFormatter, clean
from wsi_trainer.stopping import GRACE, Stopped, ends_at_once

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
