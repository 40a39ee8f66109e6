"""The step that a run is part of, and the frame: all that one run of a recording holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.execute.finite import Watch
from lightning_plugin.execute.streams import Streams, Use
from lightning_plugin.graph import Bindings, Value
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger
from lightning_plugin.ops import Spread
from lightning_plugin.plan import ChainPlan
from lightning_plugin.program.compiled import Compiler
from lightning_plugin.program.findings import Library
from lightning_plugin.program.program import Program
from lightning_plugin.progress import Progress
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.homes import Homes
from lightning_plugin.team import Team


@dataclass(frozen=True)
class Rehearsal:
    """Stand-ins for a real step's tiles and tiers: a dry run of a plan on tensors without data, to learn what it would
    hold.

    A segment runs a few tiles that stand for all, and lower tiers take no bytes; all else is the very code of a real
    step. What a pass over tiles holds is measured once for a step's library: a pass over the same tiles of an equal
    program, in another block of the network or another plan, only makes what it hands on.

    Attributes:
        tiles: The tiles of a program's grid that are run; the last argument says whether transfers go ahead.
        away: Makes what stands for a map on a lower tier.
        enter: From now on memory is counted for a segment's forward or backward (nobody's: None): a new turn of it, or,
            where the second argument says that it goes on, the one that began before.
        during: A block whose memory is counted so, and after it again as before.
    """

    tiles: Callable[[Program, Grid, bool], Iterable[tuple[Box, ...]]]
    away: Callable[[Layout, torch.dtype, torch.device, str], Any]
    enter: Callable[[Any, bool], None]
    during: Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class Step:
    """One run of a plan, seen by all of its segments.

    Attributes:
        ledger: Counts what the step holds on the device.
        team: The ranks that share its tiles.
        folder: Where maps on the disk are kept; None is the system's folder.
        progress: Hears of tiles that are done, and of waiting.
        rehearsal: What stands for tiles and tiers, if the step is rehearsed.
        library: What earlier steps have found of tiles.
        homes: Where streamed tensors live.
        compiler: Compiles tapes, if tiles are to be compiled.
        watch: Looks at each result, if values that are not finite are looked for.
    """

    ledger: Ledger | None = None
    team: Team | None = None
    folder: str | None = None
    progress: Progress = field(default_factory=Progress)
    rehearsal: Rehearsal | None = None
    library: Library = field(default_factory=Library)
    homes: Homes = field(default_factory=Homes)
    compiler: Compiler | None = None
    watch: Watch | None = None

    def done(self, tiles: int) -> None:
        """Tell listeners of so many identical tiles that are done."""
        self.progress.report_tiles(tiles)
        self.settle()

    def settle(self) -> None:
        """Between two tiles, or segments: let the process not keep much more than the ledger counts."""
        if self.ledger is not None:
            self.ledger.trim_memory()


@dataclass(frozen=True, eq=False)
class Frame:
    """State of one run of a recording.

    Attributes:
        bindings: The recording's images and captured tensors.
        vectors: The vectors that were computed, with their autograd history.
        step: The step that the run is part of.
        whole: The maps that lie in ordinary tensors.
        stored: The boundaries.
        tokens: The number that stands for each boundary in autograd's graph.
        streams: The vectors that are fetched for a use only.
        chains: The plan of each chain, by its node's serial number.
        background: The number of first segments in which constant parts of maps are looked for: up to the last that
            the plan has share identical tiles.
    """

    bindings: Bindings
    vectors: dict[Value, Tensor] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    whole: dict[Value, Tensor] = field(default_factory=dict)
    stored: dict[Value, Boundary] = field(default_factory=dict)
    tokens: dict[Value, Tensor] = field(default_factory=dict)
    streams: Streams | None = None
    chains: Mapping[int, ChainPlan] = field(default_factory=dict)
    background: int = 0

    def __contains__(self, v: object) -> bool:
        return v in self.vectors or v in self.whole or v in self.stored

    def vector(self, v: Value) -> Tensor:
        """A vector that was computed."""
        if v not in self.vectors:
            raise AssertionError(f"{v.label} is needed before it is computed")
        return self.vectors[v]

    def serves(self, v: Value) -> bool:
        """True of a vector that is there for a use only."""
        return self.streams is not None and v in self.streams.served

    def use(self, use: Use, needed: Sequence[Value]) -> AbstractContextManager[None]:
        """A block in which these vectors are there."""
        return nullcontext() if self.streams is None else self.streams.use(use, needed, self.vectors)

    def ordinary(self, v: Value) -> Tensor | None:
        """The ordinary tensor that a map lies in, if it does: a spread vector, or a map that was made whole."""
        if v.node is not None and isinstance(v.node.op, Spread):
            return self.vector(v.node.inputs[0])
        return self.whole.get(v)

    def made(self, values: Sequence[Value]) -> list[Tensor]:
        """The ordinary tensors among some values."""
        found = (self.whole.get(v) if v.is_map else self.vectors.get(v) for v in values)
        return [t for t in found if t is not None]

    def forget_maps(self) -> None:
        """The run is over, or has failed: an error that somebody keeps must not keep the maps that were made."""
        for maps in (self.whole, self.stored, self.tokens):
            maps.clear()

    def release(self, v: Value) -> None:
        """A map is needed no longer by this run: what autograd keeps of it, it keeps."""
        handle = self.stored.pop(v, None)
        if handle is not None:
            handle.drop_data()
        self.whole.pop(v, None)
