"""Keep the console for progress and for what the user can act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_trainer.words import CleanFormatter

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


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """In this context Lightning's messages go to a file; only warnings also go to the console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
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
