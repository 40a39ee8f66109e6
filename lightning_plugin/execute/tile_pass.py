"""A tile pass: run and watched, run, or in a rehearsal that knows it only made. See [Note: watched] in `ledger` and
[Note: known] in `rehearsal`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from lightning_plugin.execute.rehearsal import Likeness, Pass
from lightning_plugin.execute.segment import SegmentRun
from lightning_plugin.ledger import Ledger
from lightning_plugin.program.findings import Tapes


class TilePass(Protocol):
    """Forward or backward of a segment; ``watched``: the ledger watches the first tile of each kind."""

    tapes: Tapes
    watched: bool

    def over_tiles(self) -> None: ...
    def made_now(self) -> tuple[tuple[int, ...], tuple[Any, ...]]: ...
    def make(self, known: Pass) -> None: ...


def pass_over(work: TilePass, run: SegmentRun, likeness: Likeness | None) -> None:
    """Run a pass over tiles, unwatched if one like it was watched; in a rehearsal that knows it, make what it makes."""
    ledger, rehearsal = run.ledger, run.rehearsal
    if likeness is None or ledger is None:
        work.over_tiles()
    elif rehearsal is None:
        watch_over(work, ledger, likeness.same)
    elif (known := rehearsal.passes.get(likeness)) is not None:
        with ledger.stretch():
            work.make(known)
    else:
        with ledger.stretch() as stretch:
            work.over_tiles()
        rehearsal.passes.learn(likeness, Pass(tuple(stretch.needs), *work.made_now()), stretch.trace)


def watch_over(work: TilePass, ledger: Ledger, likeness: Hashable) -> None:
    """Run a pass over tiles, which is watched if none like it was."""
    passes = work.tapes.found.passes
    known = passes.get(likeness)
    work.watched = known is None
    with ledger.stretch(() if known is None else known.needs) as stretch:
        work.over_tiles()
    if known is None:
        passes[likeness] = Pass(tuple(stretch.needs), *work.made_now())
