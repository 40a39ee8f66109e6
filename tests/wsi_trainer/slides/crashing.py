"""What runs in worker processes of the tests for processes that die or hang: it must be importable there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from wsi_trainer.preprocess import pool

_original = pool._attempt_in_worker


def attempt_in_worker(number: int, work: Any, job: Any, threads: int) -> Any:
    if job.name == "slide_0002":
        os.kill(os.getpid(), signal.SIGKILL)
    return _original(number, work, job, threads)


def hang_in_worker(number: int, work: Any, job: Any, threads: int) -> Any:
    if job.name in ("slide_0001", "slide_0003"):
        pool._progress[pool._FIELDS * number : pool._FIELDS * (number + 1)] = [1, 4]
        while job.name == "slide_0001":  # as a decoder in an endless loop
            pass
        time.sleep(10_000)  # as a reader of a network that is gone
    return _original(number, work, job, threads)
