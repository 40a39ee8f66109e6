"""A rehearsal: a plan run on tensors without data, to learn what it would hold.

A run looks once, when it begins, whether it is only a rehearsal, and remembers it (`Courier.rehearsal`): its backward
may run in another thread, with a context of its own. In a rehearsal a segment runs a few tiles that stand for all, and
lower tiers take no bytes; all else is the very code of a real step.
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
    from lightning_plugin.program.program import Program


@dataclass(frozen=True)
class Rehearsal:
    """``tiles`` are those of a program's grid that are run (the last argument says whether transfers go ahead);
    ``away`` makes what stands for a map on a lower tier."""

    tiles: Callable[[Program, Grid, bool], Iterable[Sequence[Box]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]


REHEARSAL: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)
