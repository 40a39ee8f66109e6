"""Progress of a step, told while it runs: tiles that are done, seconds spent on pixels and on lower tiers.

Backward may run in a thread of autograd: listeners are told from whichever thread the work is done in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch.profiler import record_function

from lightning_plugin.private import profiles

#: Context of a block that no profiler looks at: opening a range takes as long as an operator.
UNSEEN: AbstractContextManager[Any] = nullcontext()

Kind = Literal["input", "spill"]


def ranged(*words: object) -> AbstractContextManager[Any]:
    """A block that PyTorch's profilers show by a name."""
    return record_function(" ".join(("lightning_plugin:", *map(str, words)))) if profiles() else UNSEEN


class Listener(Protocol):
    """Hears of every tile that is done, of how many were identical to another and cost nothing, and of time that a
    step waited for something else than computing."""

    def tile(self, count: int) -> None: ...

    def alike(self, count: int) -> None: ...

    def spent(self, kind: Kind, seconds: float) -> None: ...


@dataclass(frozen=True, eq=False)
class Progress:
    """Tells listeners of the steps of one module or strategy."""

    listeners: list[Listener] = field(default_factory=list)

    def done(self, tiles: int) -> None:
        """Tell of a tile that is done, with those that are identical to it: so many together."""
        for listener in self.listeners:
            listener.tile(tiles)
            if tiles > 1:
                listener.alike(tiles - 1)

    @contextmanager
    def spending(self, kind: Kind) -> Iterator[None]:
        """A block whose time goes to the source ("input") or to a lower tier ("spill")."""
        if not self.listeners:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            for listener in self.listeners:
                listener.spent(kind, seconds)
