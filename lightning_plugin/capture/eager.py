"""Recording what `torch.compile` made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_plugin.private import compiles


@contextmanager
def recording_eagerly() -> Iterator[None]:
    """Modules that `torch.compile` made run uncompiled: tiles are what is executed, not the recording."""
    if not compiles():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
