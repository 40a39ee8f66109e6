"""Recording what `torch.compile` made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recording_eagerly() -> Iterator[None]:
    """Modules that `torch.compile` made run uncompiled: tiles are what is executed, not the recording."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
