"""A rehearsal: a plan run on tensors without data, to learn what it would hold.

The executor asks here whether it is only rehearsing. If so, a segment runs a few tiles that stand for all, and lower
tiers take no bytes; all else is the very code of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.layout import Layout

if TYPE_CHECKING:
    from lightning_plugin.execute.program import Program


@dataclass(frozen=True)
class Rehearsal:
    """``tiles`` are those of a program's grid that are run (the last argument says whether transfers go ahead);
    ``away`` makes what stands for a map on a lower tier."""

    tiles: Callable[[Program, Grid, bool], Iterable[Sequence[Box]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]


REHEARSAL: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


def tiles_of(program: Program, grid: Grid, ahead: bool) -> Iterable[Sequence[Box]]:
    """For each tile that is to be run, the box it owns of every target."""
    rehearsal = REHEARSAL.get()
    return program.owned(grid) if rehearsal is None else rehearsal.tiles(program, grid, ahead)
