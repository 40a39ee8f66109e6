"""A rehearsal: a plan run on tensors without data, to learn what it would hold.

In a rehearsal a segment runs a few tiles that stand for all, and lower tiers take no bytes; all else is the very code
of a real step.

[Note: known] What a pass over a segment's tiles holds, beyond what lies there when it begins and the room that it makes
for whole maps, depends on what the tiles compute and on how large their boxes are. So two passes agree in it if their
programs have the same structure, the tiles that are run are of the same kinds, and what is read and made lies in the
same places. Repeated blocks of a network are such passes, and most of a plan that is like one rehearsed before. The
first is run; it leaves what it held, phase by phase (`ledger.Stretch`), and what it made. Others make what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.program.findings import Tapes, lying
from lightning_plugin.program.program import Program


@dataclass(frozen=True)
class Pass:
    """A pass over tiles: the bytes it needed in each phase; whose room the phases made, by their places; what else it
    made."""

    needs: tuple[int, ...]
    rooms: tuple[int, ...]
    made: tuple[Any, ...]


@dataclass(frozen=True)
class Rehearsal:
    """``tiles`` are those of a program's grid that are run (the last argument says whether transfers go ahead);
    ``away`` makes what stands for a map on a lower tier. ``describe`` is equal for nodes that compute the same;
    ``known`` are the passes that were run, in this rehearsal and in others of the same network; ``once``
    finds something of a program once for all that compute the same on maps of the same sizes."""

    tiles: Callable[[Program, Grid, bool], Iterable[Sequence[Box]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]
    describe: Callable[[Node], Hashable]
    known: dict[Hashable, Pass]
    once: Callable[[Program, Hashable, Callable[[], Hashable]], Hashable]

    def likeness(self, tapes: Tapes, ahead: bool) -> Hashable:
        """What two programs, on grids, have in common if their tiles hold the same; None where that is not known."""
        return self.once(tapes.program, ("likeness", tapes.grid, ahead), lambda: self.compared(tapes, ahead))

    def compared(self, tapes: Tapes, ahead: bool) -> Hashable:
        """The same, found by looking at the tiles."""
        if not tapes.regular:
            return None
        program = tapes.program
        axes = range(len(tapes.grid.counts))
        kinds = []
        for owned in self.tiles(program, tapes.grid, ahead):
            need = program.boxes(owned)
            kinds.append(tuple(tuple(lying(program, axis, owned, need)) for axis in axes))
        return structure(program, self.describe), tuple(kinds)


def structure(program: Program, describe: Callable[[Node], Hashable]) -> Hashable:
    """What a program computes from what, whatever its maps' extents are."""
    given = (*program.reads, *program.vectors)
    place: dict[int, int] = {id(v): i for i, v in enumerate(given)}
    steps = []
    for node in program.steps:
        for v in node.outputs:
            place[id(v)] = len(place)
        steps.append((describe(node), tuple(place[id(v)] for v in node.inputs), node.serial in program.overwrite))
    targets = tuple((place[id(t.node.outputs[0])], t.stored is not None) for t in program.targets)
    return tuple(map(kind_of, given)), tuple(steps), targets


def kind_of(v: Value) -> Hashable:
    """A value without its extent."""
    return v.layout.dims if v.layout is not None else v.shape, v.dtype, v.requires_grad
