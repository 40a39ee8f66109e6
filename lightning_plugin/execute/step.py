"""A step: what all segments of a run have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lightning_plugin.execute.finite import Watch
from lightning_plugin.execute.rehearsal import Rehearsal
from lightning_plugin.ledger import Ledger
from lightning_plugin.program.compiled import Compiler
from lightning_plugin.program.findings import Library
from lightning_plugin.progress import Progress, S
from lightning_plugin.residency.homes import Homes
from lightning_plugin.team import Team


@dataclass(frozen=True, eq=False)
class Step:
    """How a plan is run: who counts what it holds, the ranks that share its tiles, the folder for maps on the disk
    (None: the system's), who hears of its progress, what is rehearsed, if it is only a rehearsal, what earlier
    steps have found of tiles, where streamed tensors live, what compiles tapes, and what looks at each result, if
    something does."""

    ledger: Ledger | None = None
    team: Team | None = None
    folder: str | None = None
    progress: Progress = field(default_factory=Progress)
    rehearsal: Rehearsal | None = None
    library: Library = field(default_factory=Library)
    homes: Homes = field(default_factory=Homes)
    compiler: Compiler | None = None
    watch: Watch | None = None

    def told(self, work: Iterable[S]) -> Iterator[S]:
        """Groups of tiles, each told to listeners when it is done."""
        for tiles in self.progress.told(work):
            yield tiles
            self.settle()

    def settle(self) -> None:
        """Between two tiles, or segments: let the process not keep much more than the ledger counts."""
        if self.ledger is not None:
            self.ledger.settle()
