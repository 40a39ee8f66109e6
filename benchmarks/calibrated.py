"""Rates that are measured before a benchmark plans, beside those that others have measured on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from lightning_plugin import calibrate
from lightning_plugin.planner import cache

#: What a benchmark says of plans that go by them.
RATES = "calibrated"


@contextmanager
def calibrated() -> Iterator[None]:
    """From here on, plans go by the processor's own rates; nothing that was planned before is known."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {cache.VARIABLE: folder}):
        calibrate("cpu")
        yield
