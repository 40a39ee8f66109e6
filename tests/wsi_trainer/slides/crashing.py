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


HANGING = ("slide_0001", "slide_0003")


def hang(job: Any) -> None:
    while job.name == "slide_0001":  # as a decoder in an endless loop
        pass
    if job.name == "slide_0003":  # as a reader of a network that is gone
        time.sleep(10_000)


def hang_in_worker(number: int, work: Any, job: Any, threads: int) -> Any:
    hang(job)
    return _original(number, work, job, threads)


def work_on_dask(job: Any, threads: int = 1, progress: Any = None) -> str:
    """Three steps of a slide, of which some make the first and hang."""
    progress(1, 4)
    hang(job)
    progress(4, 4)
    return str(job.name)
