"""State of execution: the step, shared by all segments of a run, and the frame, the state of one run."""

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
    """Replacements in a dry run of a plan on tensors without data, which measures the plan's memory.

    A segment runs a few tiles in place of all, and maps on lower tiers take no bytes. All other code is that of a real
    step. The memory of a tile pass is measured once for each library: an equal pass, in another block of the network or
    another plan, only makes its results.

    Attributes:
        tiles: Chooses the tiles of a program's grid that run; the last argument tells if transfers go ahead.
        make_stand_in: Makes the stand-in of a map on a lower tier.
        begin_turn: Counts memory from now on for a turn: the forward or backward of a segment, or None. The second
            argument continues the turn that began before, instead of a new one.
        turn: Counts the memory of a block for a turn.
    """

    tiles: Callable[[Program, Grid, bool], Iterable[tuple[Box, ...]]]
    make_stand_in: Callable[[Layout, torch.dtype, torch.device, str], Any]
    begin_turn: Callable[[Any, bool], None]
    turn: Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class Step:
    """State that all segments of a run of a plan share.

    Attributes:
        ledger: Counts the bytes of the step on the device.
        team: The ranks that share its tiles.
        folder: Folder of maps on the disk; None for the system's folder of temporary files.
        progress: Reports tiles that are done, and time spent waiting.
        rehearsal: Replacements for tiles and tiers, if the step is rehearsed.
        library: Findings of earlier steps.
        homes: Tiers and files of streamed tensors.
        compiler: Compiles tapes, if tiles are compiled.
        watch: Checks each result for non-finite values, if these are searched.
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

    def report_tiles(self, tiles: int) -> None:
        """Report a tile and those identical to it, ``tiles`` in all, as done."""
        self.progress.report_tiles(tiles)
        self.trim_memory()

    def trim_memory(self) -> None:
        """Return freed memory of the process to the system, between tiles or segments."""
        if self.ledger is not None:
            self.ledger.trim_memory()


@dataclass(frozen=True, eq=False)
class Frame:
    """State of one run of a recording.

    Attributes:
        bindings: The recording's images and captured tensors.
        vectors: The vectors that were computed, with their ``grad_fn``.
        step: The step.
        whole_maps: The maps that are ordinary tensors.
        boundaries: The stored maps.
        tokens: The scalar in place of each boundary in autograd's graph.
        streams: The streamed tensors of the run.
        chains: The plan of each chain, by its node's serial number.
        background_segments: Number of segments, from the first, that look for constant parts of maps: up to the last
            one that groups identical tiles by its plan.
    """

    bindings: Bindings
    vectors: dict[Value, Tensor] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    whole_maps: dict[Value, Tensor] = field(default_factory=dict)
    boundaries: dict[Value, Boundary] = field(default_factory=dict)
    tokens: dict[Value, Tensor] = field(default_factory=dict)
    streams: Streams | None = None
    chains: Mapping[int, ChainPlan] = field(default_factory=dict)
    background_segments: int = 0

    def __contains__(self, v: object) -> bool:
        return v in self.vectors or v in self.whole_maps or v in self.boundaries

    def vector(self, v: Value) -> Tensor:
        """Return a vector that was computed."""
        if v not in self.vectors:
            raise AssertionError(f"{v.label} is needed before it is computed")
        return self.vectors[v]

    def has_streamed(self, v: Value) -> bool:
        """True for a streamed vector, which is on the device during its uses only."""
        return self.streams is not None and v in self.streams.streamed

    def fetch_streamed(self, use: Use, needed: Sequence[Value]) -> AbstractContextManager[None]:
        """Return a context in which these vectors, if streamed, are on the device."""
        return nullcontext() if self.streams is None else self.streams.during_use(use, needed, self.vectors)

    def ordinary_tensor(self, v: Value) -> Tensor | None:
        """Return a map as an ordinary tensor, if it is a spread vector or was made whole; else None."""
        if v.node is not None and isinstance(v.node.op, Spread):
            return self.vector(v.node.inputs[0])
        return self.whole_maps.get(v)

    def ordinary_tensors(self, values: Sequence[Value]) -> list[Tensor]:
        """Return the ordinary tensors of those values that have one."""
        found = (self.whole_maps.get(v) if v.is_map else self.vectors.get(v) for v in values)
        return [t for t in found if t is not None]

    def clear_maps(self) -> None:
        """Drop all maps at the end of a run: an error that the user keeps must not keep them."""
        for maps in (self.whole_maps, self.boundaries, self.tokens):
            maps.clear()

    def release(self, v: Value) -> None:
        """Drop a map that the rest of this run does not read; autograd may still hold it."""
        handle = self.boundaries.pop(v, None)
        if handle is not None:
            handle.drop_data()
        self.whole_maps.pop(v, None)
