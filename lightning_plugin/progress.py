"""Progress of a step while it runs: tiles that are done, and seconds spent waiting for pixels and for lower tiers.

Backward may run in a thread of autograd: listeners are called from the thread that does the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch.profiler import record_function

from lightning_plugin.private import is_profiling

#: Context without a profiler range: opening a range takes as long as an operator.
NO_RANGE: AbstractContextManager[Any] = nullcontext()

Kind = Literal["input", "spill"]


def profiler_range(*words: object) -> AbstractContextManager[Any]:
    """Name a block for PyTorch's profilers; without a running profiler nothing is done."""
    return record_function(" ".join(("lightning_plugin:", *map(str, words)))) if is_profiling() else NO_RANGE


class Listener(Protocol):
    """Listener of steps."""

    def on_tiles(self, count: int) -> None:
        """Called after every tile; ``count`` is that tile and the ones identical to it."""

    def on_identical_tiles(self, count: int) -> None:
        """Called with the number of tiles that were not computed, since they are identical to another."""

    def on_wait(self, kind: Kind, seconds: float) -> None:
        """Called after waiting for the source ("input") or for a lower tier ("spill")."""


@dataclass(frozen=True, eq=False)
class Progress:
    """Calls the listeners of one module's or one strategy's steps."""

    listeners: list[Listener] = field(default_factory=list)

    def report_tiles(self, count: int) -> None:
        """Report a tile, and the ones identical to it, as done; ``count`` is all of them."""
        for listener in self.listeners:
            listener.on_tiles(count)
            if count > 1:
                listener.on_identical_tiles(count - 1)

    @contextmanager
    def waiting(self, kind: Kind) -> Iterator[None]:
        """Report the time of a block that waits for the source ("input") or for a lower tier ("spill")."""
        if not self.listeners:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            for listener in self.listeners:
                listener.on_wait(kind, seconds)
