"""A rehearsal: a plan run on tensors without data, to learn what it would hold.

In a rehearsal a segment runs a few tiles that stand for all, and lower tiers take no bytes; all else is the very code
of a real step.

[Note: known] What a pass over a segment's tiles holds, beyond what lies there when it begins and the room that it makes
for whole maps, depends on what the tiles compute and on how large their boxes are. So two passes agree in it if their
programs have the same structure, the tiles that are run are of the same kinds, and what is read and made lies in the
same places. Repeated blocks of a network are such passes, and most of a plan that is like one rehearsed before. The
first is run; it leaves what it held, phase by phase (`stretch`), and what it made. Others make what it made. Where
tiles differ in nothing but how large their boxes are, two or three passes are run, and what others need is added up
from what these have made and let go: see [Note: traced] in `trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_plugin.bounded import put_last
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.execute.gradients import FEW
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.program.findings import Lie, Tapes, lies, lying
from lightning_plugin.program.program import Program
from lightning_plugin.trace import Measures, Sides, Trace, Traces

#: Of so many passes it is remembered what they needed, and of so many that differ in more than sizes the traces: the
#: latest.
MOST_PASSES, MOST_TRACES = 4096, 256


@dataclass(frozen=True)
class Pass:
    """A pass over tiles: the bytes it needed in each phase; whose room the phases made, by their places; what else it
    made."""

    needs: tuple[int, ...]
    rooms: tuple[int, ...]
    made: tuple[Any, ...]


#: The measures of passes that are not compared with larger ones.
NOTHING = Measures((), ())


@dataclass(frozen=True)
class Likeness:
    """What a pass over tiles has in common with others: ``same`` with those that hold the same, ``alike`` with those
    whose tiles differ in nothing but their sizes, which are ``measures``; None where those are not compared."""

    same: Hashable
    alike: Hashable = None
    measures: Measures = NOTHING

    def among(self, *more: Hashable) -> Likeness:
        """The likeness of passes that have this in common, too."""
        alike = None if self.alike is None else (self.alike, more)
        return replace(self, same=(self.same, more), alike=alike)


@dataclass
class Passes:
    """The passes that rehearsals of a network have run, and what follows for others."""

    known: dict[Hashable, Pass] = field(default_factory=dict)
    traces: dict[Hashable, tuple[Pass, Traces]] = field(default_factory=dict)

    def get(self, likeness: Likeness) -> Pass | None:
        """What a pass needs and makes, if that is known."""
        found = self.known.get(likeness.same)
        if found is None and likeness.alike in self.traces:
            first, traces = self.traces[likeness.alike]
            needs = traces.needs(likeness.measures)
            if needs is not None:
                found = put_last(self.known, likeness.same, replace(first, needs=needs), MOST_PASSES)
        return found

    def learn(self, likeness: Likeness, ran: Pass, trace: Trace) -> None:
        """Remember a pass that was run."""
        put_last(self.known, likeness.same, ran, MOST_PASSES)
        if likeness.alike is not None:
            first, traces = self.traces.get(likeness.alike, (ran, Traces()))
            if (first.rooms, len(first.made)) == (ran.rooms, len(ran.made)):
                traces.learn(likeness.measures, trace)
            put_last(self.traces, likeness.alike, (first, traces), MOST_TRACES)


@dataclass(frozen=True)
class Rehearsal:
    """``tiles`` are those of a program's grid that are run (the last argument says whether transfers go ahead);
    ``away`` makes what stands for a map on a lower tier. ``describe`` is equal for nodes that compute the same;
    ``passes`` are those that were run, in this rehearsal and in others of the same network; ``once``
    finds something of a program once for all that compute the same on maps of the same sizes."""

    tiles: Callable[[Program, Grid, bool], Iterable[Sequence[Box]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]
    describe: Callable[[Node], Hashable]
    passes: Passes
    once: Callable[[Program, Hashable, Callable[[], Likeness | None]], Likeness | None]

    def likeness(self, tapes: Tapes, ahead: bool, views: Sequence[bool]) -> Likeness | None:
        """What two programs, on grids, have in common if their tiles hold the same; None where that is not known.
        ``views``: which of the maps that they read are there as a whole, so that tiles are views of them."""
        about = "likeness", tapes.grid, ahead, tuple(views)
        return self.once(tapes.program, about, lambda: self.compared(tapes, ahead, views))

    def compared(self, tapes: Tapes, ahead: bool, views: Sequence[bool]) -> Likeness | None:
        """The same, found by looking at the tiles."""
        if not tapes.regular:
            return None
        program, axes = tapes.program, range(len(tapes.grid.counts))
        kinds: list[Hashable] = []
        alike: list[Hashable] = []
        sizes: list[Sides] = []
        for owned in self.tiles(program, tapes.grid, ahead):
            need = program.boxes(owned)
            found = list(lies(program, owned, need))
            kinds.append(tuple(tuple(lying(found, axis)) for axis in axes))
            cut = [ends(v, need[id(v)]) for v, view in zip(program.reads, views, strict=True) if view and id(v) in need]
            alike.append((tuple(map(unsized, found)), tuple(cut)))
            for lie in found:
                sizes += measures_of(lie)
        computed = structure(program, self.describe)
        maps = {id(v): v for n in program.steps for v in (*n.maps, *n.outputs) if v.is_map}
        measures = Measures(tuple(sizes), tuple((v.bytes,) for v in maps.values()))
        few = tapes.grid.tiles > FEW
        return Likeness((computed, tuple(kinds), few), (computed, tuple(alike), few), measures)


def unsized(lie: Lie) -> Hashable:
    """How a box lies, whatever its size: what is all of what is held, and what is one position, is told apart, since
    such parts lie in memory in one piece."""
    box, wanted = lie.box, lie.wanted
    if box is None or wanted is None:
        return None
    if lie.node is not None:
        return tuple((hi - lo == 1, lie.node.op.mark(a, lo, hi)) for a, (lo, hi) in enumerate(box.intervals()))  # type: ignore[attr-defined]
    return tuple(
        (first == lo, last == hi, hi - lo == 1, last - first == 1)
        for lo, hi, first, last in zip(box.lo, box.hi, wanted.lo, wanted.hi, strict=True)
    )


def ends(v: Value, box: Box) -> Hashable:
    """Where a part of a map is all of it: it lies in memory in one piece, or not."""
    return tuple(hi - lo == size for (lo, hi), size in zip(box.intervals(), v.space.extent, strict=True))


def measures_of(lie: Lie) -> Iterator[Sides]:
    """The sides of what is held of a map and of what is wanted of it."""
    if lie.box is not None and lie.wanted is not None:
        yield from (lie.box.extent, lie.wanted.extent)


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
