"""A rehearsal: a plan run on tensors without data, to learn what it would hold.

In a rehearsal a segment runs a few tiles that stand for all, and lower tiers take no bytes; all else is the very code
of a real step. What a pass over tiles holds is measured once: a pass over the same tiles of an equal program, in
another block of the network or another plan, only makes what it hands on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.layout import Layout
from lightning_plugin.program.program import Program


@dataclass(frozen=True)
class Rehearsal:
    """Stand-ins for a real step's tiles and tiers.

    Attributes:
        tiles: The tiles of a program's grid that are run; the last argument says whether transfers go ahead.
        away: Makes what stands for a map on a lower tier.
        look: Equal for programs that compute the same on maps of the same sizes.
        passes: The bytes that passes over tiles were found to hold beyond what lay there.
    """

    tiles: Callable[[Program, Grid, bool], Iterable[tuple[Box, ...]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]
    look: Callable[[Program], Hashable]
    passes: dict[Hashable, int]
