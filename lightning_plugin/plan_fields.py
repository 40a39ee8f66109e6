"""The fields of a plan: which maps are stored and where, in which segments the network runs, and on which tile grids.

A plan names values by the place of their node among the nodes of a run, so that it fits every run of the same network
at the same shapes. It is data: the executor holds no policy, and whatever a plan says, the result is the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.plan_forecast import ChainForecast, Forecast, SegmentForecast

#: Where a map can be stored, from the fastest and smallest tier to the slowest and largest.
TIERS = ("device", "host", "disk")
#: No boundary is dropped so deep.
DEEPEST = sys.maxsize
#: What neighbouring tiles do about the rows between them: both compute them, or one hands them on.
HALOS = ("recompute", "share")


@dataclass(frozen=True)
class SegmentPlan:
    """One segment.

    ``targets`` are the nodes whose results it makes: reduce nodes and stored maps. A *kept* segment runs all the nodes
    it names whole, with ordinary autograd, as plain PyTorch would; its grids are of one tile. ``tier`` is where its
    stored maps live, ``half`` whether as bfloat16, which loses digits; ``ahead`` whether tiles go to lower tiers and
    come from there while others are computed. ``drop`` is how deep its stored maps are dropped, let go after forward
    and made again in backward (see [Note: dropped] in `execute.again`); 0 is not at all. With ``halo="share"`` tiles
    run in order and hand rows on; the grid cuts one axis. In so many ``pieces`` a tile of queries reads the keys and
    values that it attends to (see [Note: pieces] in `rules.pieces`). With ``alike``, identical tiles are looked for and
    evaluated once (see [Note: identical tiles] in `execute.alike`). With ``recall``,
    backward reads back what the segment has stored, where only reductions look at it (see [Note: recall] in
    `program.recall`).

    All these decide. ``path`` names its modules for people and ``forecast`` predicts: neither makes it another one.
    """

    targets: tuple[int, ...]
    forward: Grid
    backward: Grid
    keep: bool = False
    tier: str = "device"
    halo: str = "recompute"
    half: bool = False
    ahead: bool = False
    drop: int = 0
    pieces: int = 1
    alike: bool = False
    recall: bool = False
    path: str = field(default="", compare=False)
    forecast: SegmentForecast = field(default=SegmentForecast(), compare=False)

    @property
    def may_recall(self) -> bool:
        """Whether what it stores is there in backward, to the bit and tile by tile."""
        return not (self.keep or self.halo == "share" or self.half or self.drop)

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise PlanError(f"a map is stored on one of {', '.join(TIERS)}, not on {self.tier!r}")
        if self.keep and self.ahead:
            raise PlanError("a segment that is kept has no tiles to transfer ahead")
        if self.drop < 0:
            raise PlanError(f"maps are dropped to a depth of 0 (not at all) or more, not {self.drop}")
        if self.drop and (self.keep or self.tier != "device" or self.halo == "share"):
            raise PlanError(
                "only a tiled segment that stores on the device and recomputes its halos can drop what it stores"
            )
        if self.pieces < 1 or (self.pieces > 1 and (self.keep or self.halo == "share")):
            raise PlanError(
                "keys are read in one piece or more, in several only by a tiled segment that recomputes its halos; "
                f"not in {self.pieces}"
            )
        if self.alike and (self.keep or self.halo == "share"):
            raise PlanError("tiles are evaluated for each other only in a tiled segment that recomputes its halos")
        if self.recall and not self.may_recall:
            raise PlanError(
                "only a tiled segment that recomputes its halos, and stores its maps as they are, can read them back"
            )
        if self.halo not in HALOS:
            raise PlanError(f"halos are {' or '.join(HALOS)}, not {self.halo!r}")
        if self.halo == "share" and self.forward != self.backward:
            raise PlanError(
                f"a segment that shares halos has one grid for both directions, not {self.forward} and {self.backward}"
            )


@dataclass(frozen=True)
class ChainPlan:
    """One chain (see [Note: chain] in `chain`): the place of its node, and how many links it has.

    So many maps between links are stored at a time (``slots``), beside the first; of the last links, so many are
    ``kept`` as plain PyTorch keeps them. Each link runs in ``segments``, whose targets are places among its own nodes.
    """

    node: int
    count: int
    slots: int
    kept: int
    segments: tuple[SegmentPlan, ...]
    path: str = field(default="", compare=False)
    forecast: ChainForecast = field(default=ChainForecast(), compare=False)

    def __post_init__(self) -> None:
        if self.slots < 0 or not 0 <= self.kept <= self.count:
            raise PlanError(
                f"a chain of {self.count} links has 0 slots or more and keeps 0 to {self.count} links; this one has "
                f"{self.slots} and keeps {self.kept}"
            )


#: All figures of a plan: of the step, and of each segment.
Forecasts = tuple[Forecast, tuple[SegmentForecast, ...]]


@dataclass(frozen=True)
class BarePlan:
    """All that is decided before a step, and its ``forecast``; `Plan` adds how it is read, saved and drawn.

    Plans are equal if and only if they decide the same: ``segments``, within what ``budget``, for images of what
    ``shape``, and which operators run whole (``barriers``); which captured tensors (parameters, by the places of their
    nodes) live below the device, ``on_host`` or ``on_disk``, and whether copies of them are ``fetched_ahead`` of the
    use that they are for (see [Note: streamed] in `residency.homes`); and how its ``chains`` run.
    """

    segments: tuple[SegmentPlan, ...]
    budget: int | None = None
    shape: tuple[int, ...] = ()
    barriers: tuple[str, ...] = ()
    approximation: str = ""
    forecast: Forecast = field(default=Forecast(), compare=False)
    on_host: tuple[int, ...] = ()
    on_disk: tuple[int, ...] = ()
    fetched_ahead: bool = False
    chains: tuple[ChainPlan, ...] = ()

    @property
    def forecasts(self) -> Forecasts:
        """All that is predicted of it: what plans that decide the same may differ in."""
        return self.forecast, tuple(s.forecast for s in self.segments)
