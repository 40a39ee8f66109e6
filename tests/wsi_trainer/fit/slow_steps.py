"""The command line with steps that take long in C: what a signal has to end."""

import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from wsi_trainer import cli
from wsi_trainer.models import SlideClassifier


def _sleep(self: SlideClassifier, batch: object, batch_idx: int) -> None:
    if self.global_step:  # the first step is there to leave a checkpoint
        time.sleep(600)


def fit(words: Sequence[str]) -> NoReturn:
    """Run `wsi-train` with these words, as the whole of a process."""
    SlideClassifier.on_train_batch_start = _sleep  # type: ignore[method-assign]
    sys.exit(cli.main(words))


def _never(self: SlideClassifier, *_: object, **__: object) -> None:
    print("looking at a slide", flush=True)
    time.sleep(600)


def look(words: Sequence[str]) -> NoReturn:
    """The same where looking at a slide takes long."""
    SlideClassifier.predicted = SlideClassifier.forward = _never  # type: ignore[method-assign, assignment]
    sys.exit(cli.main(words))
