"""Rates that are measured before a benchmark plans, beside those that others have measured on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_plugin import calibrate
from lightning_plugin.planner import cache


@contextmanager
def calibrated() -> Iterator[None]:
    """From here on, plans go by the processor's own rates; nothing that was planned before is known."""
    before = os.environ.get(cache.VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[cache.VARIABLE] = folder
        try:
            calibrate("cpu")
            yield
        finally:
            os.environ.pop(cache.VARIABLE)
            if before is not None:
                os.environ[cache.VARIABLE] = before
