"""The engine: has recordings run, and owns what outlives a step.

Three owners: `Options` are the user's and never change; `Planner` decides, and remembers plans; `Engine` has the
memory: the ledger, the homes of streamed tensors, the programs of tiles.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from lightning_plugin.execute import finite
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Recording, Value, drawn
from lightning_plugin.ledger import Ledger, with_gradients
from lightning_plugin.memory import Heap
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.plans import Occupied, Planner, tables_of, whole_call
from lightning_plugin.private import forget_failed
from lightning_plugin.program.compiled import Compiler
from lightning_plugin.program.findings import Library
from lightning_plugin.progress import Progress
from lightning_plugin.residency.homes import Homes, move
from lightning_plugin.residency.tiers import make_room_for_pinned

log = logging.getLogger("lightning_plugin")

#: Bytes that may be left of a step that is over: losses and other numbers that somebody keeps.
SCRAPS = 1024


class PlanListener(Protocol):
    """Hears of plans, before they run."""

    def announce(self, plan: Plan, structure: str, alike: bool = False) -> None:
        """A new plan, for a network's ``structure``. Plans that are ``alike`` differ in the splits of their step."""

    def runs(self, plan: Plan, ranks: int = 1) -> None:
        """A plan that runs, its tiles shared among so many ranks."""


@dataclass(eq=False)
class Engine:
    """Runs the recordings of one module, or of one strategy.

    Attributes:
        planner: Decides, by the user's options.
        plan: The last plan that ran.
        ledger: Counts the bytes of the step on the device.
        progress: Tells of steps while they last.
        library: Programs of tiles that earlier steps have made.
        homes: Where streamed tensors live.
        compiler: Compiles tapes, if the user wants it.
        owed: Bytes that optimizers keep for each tensor, by identity.
        listener: Hears of plans.
    """

    planner: Planner = field(default_factory=Planner)
    plan: Plan | None = field(default=None, init=False)
    ledger: Ledger | None = field(default=None, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    library: Library = field(default_factory=Library, init=False)
    homes: Homes = field(default_factory=Homes, init=False)
    compiler: Compiler | None = field(default=None, init=False)
    owed: dict[int, int] = field(default_factory=dict, init=False)
    listener: PlanListener | None = field(default=None, init=False)
    _non_finite: finite.NonFinite | None = field(default=None, init=False)
    _looks: WeakSet[finite.Look] = field(default_factory=WeakSet, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Only what it was made of: all else is about tensors that a copy, a deep one or one in another process, has
        not."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(type(self)(**state).__dict__)

    @property
    def options(self) -> Options:
        return self.planner.options

    # Before a step

    def choose(self, recording: Recording) -> Plan:
        """The plan by which a recording runs beside what the device holds."""
        forget_failed()
        occupied = Occupied() if self.options.budget is None else self.occupied(recording)
        plan = self.planner.known(recording, occupied)
        if plan is None and occupied.bytes:
            gc.collect()  # bytes that only wait for it are not held
            occupied = self.occupied(recording)
            plan = self.planner.known(recording, occupied)
        if plan is None:
            plan = self.planner.make(recording, occupied)
            if self.listener is not None:
                once = drawn(recording.nodes)
                self.listener.announce(plan, plan.approximation if once else tables_of(recording), alike=once)
        return plan

    def occupied(self, recording: Recording) -> Occupied:
        """The device as it is beside what a recording uses: of ranks that share an image, the one that holds most."""
        ledger, team = self.ledger, self.planner.team
        tiers = {id(t): tier for t in recording.tensors if (tier := self.homes.tier(t)) is not None}
        if ledger is None:
            beside = excess = 0
        else:
            beside, excess = ledger.beside(recording.tensors), ledger.excess
        if team is not None:
            beside, excess = (max(found) for found in zip(*team.gather((beside, excess)), strict=True))
        return Occupied(beside if beside > SCRAPS else 0, excess, ledger, self.owed, tiers)

    def places(self, tensor: Tensor) -> bool:
        """True if a plan decides the tier of a tensor on the CPU: under a budget, a parameter need not be where the
        image is."""
        free = self.options.budget is not None and self.options.parameters != "device"
        return tensor in self.homes or (free and isinstance(tensor, nn.Parameter))

    def begin(self, plan: Plan, recording: Recording) -> Step:
        """Move parameters to where a plan has them, and open the step's page of the ledger."""
        options, images = self.options, recording.images
        if self.listener is not None:
            self.listener.runs(plan, 1 if self.planner.team is None else self.planner.team.size)
        before, self.plan = self.plan, plan
        device = images[0].device if images else torch.device("cpu")
        if self.ledger is None or self.ledger.device != device:
            self.ledger = Ledger(device)
        self.homes.folder = options.folder
        size = sum(segment.forecast.stored_bytes for segment in plan.segments if segment.tier == "host")
        if size and device.type == "cuda" and before != plan:
            make_room_for_pinned(size, lower_tiers(device.type, options).host or 0)
        self._place(plan, recording, self.ledger)
        if not self.occupied(recording).bytes:
            self.ledger.begin()
        self.ledger.limit = options.budget
        if options.trim and options.budget is not None and device.type == "cpu":
            self.ledger.heap = self.ledger.heap or Heap(options.budget)
            self.ledger.heap.budget = options.budget  # which may be another than the last step's
        for image in images:
            for t in with_gradients([] if image.tensor is None else [image.tensor]):
                self.ledger.ignore(t)
        for tensor in recording.tensors:
            if tensor not in self.homes:
                self.ledger.hold(tensor)
        if self.compiler is None and options.compile != "never":
            self.compiler = Compiler(options.compile)
        step = Step(
            self.ledger, self.planner.team, options.folder, self.progress, library=self.library, homes=self.homes,
            compiler=self.compiler,
        )  # fmt: skip
        forecast = plan.forecast
        self.ledger.calls[step] = whole_call(recording, forecast.plain_bytes, self.owed, forecast.reserve_bytes)
        return step

    def _place(self, plan: Plan, recording: Recording, ledger: Ledger) -> None:
        """Have tensors live where a plan puts them, or where they live already."""
        captures = recording.bindings.captures
        planned = dict.fromkeys(plan.on_host, "host") | dict.fromkeys(plan.on_disk, "disk")
        for place, node in enumerate(recording.nodes):
            capture = captures.get(node.outputs[0]) if node.outputs else None
            if capture is None:
                continue
            tier = self.homes.tier(capture.tensor) or planned.get(place)
            if tier is not None:
                for t in with_gradients([capture.tensor]):
                    ledger.discount(t)
                self.homes.settle(capture.tensor, tier, node.outputs[0].device)
            elif self.places(capture.tensor):
                move(capture.tensor, node.outputs[0].device)
        self.homes.rest()

    # After a step

    @property
    def peak_bytes(self) -> int:
        """Bytes that the last step (from its forward on, until the next) held at its worst moment, with what optimizers
        keep."""
        if self.ledger is None:
            return 0
        return self.ledger.peak_bytes + self.planner.reserved - sum(self.owed.get(id(t), 0) for t in self.homes)

    def look(self, recording: Recording, values: Sequence[Value], vectors: Mapping[Value, Tensor]) -> None:
        """Have it found out in backward whether a loss is finite; see [Note: non-finite] in `execute.finite`."""
        results = finite.followed(values, vectors)
        if self._non_finite is not None or not results:
            return
        look = finite.Look(results, recording, vectors)
        self._looks.add(look)
        for t in results:
            t.register_hook(lambda _: self._read(look))

    @property
    def non_finite(self) -> finite.NonFinite | None:
        """The first operator whose result was not finite, in the first step whose loss was not."""
        for look in list(self._looks):
            self._read(look)
        return self._non_finite

    def _read(self, look: finite.Look) -> None:
        """Find the operator that was the first to make something that is not, once, and say so."""
        if look not in self._looks:
            return
        self._looks.discard(look)
        recording, known = look.taken()
        first = None
        if self._non_finite is None and look.non_finite():
            first = finite.first_vector(recording.nodes, known)
        if first is None:
            return
        node, value, how = first
        found, more = finite.at_once(recording.nodes, node, value, how), ""
        if found is None and self.planner.team is not None:
            more = " (its tiles lie on several ranks, and are not looked at)"
        elif found is None:
            try:
                found = self._look_in_tiles(recording, value, known)
            except EngineError as refused:
                more = f" (its tiles are not looked at: {refused})"
        self._non_finite = found or finite.NonFinite(how, finite.named(node))
        log.warning("what is trained for is not finite: %s%s", self._non_finite, more)

    def _look_in_tiles(
        self, recording: Recording, value: Value, vectors: Mapping[Value, Tensor]
    ) -> finite.NonFinite | None:
        """Run the operators behind a vector that is not finite once more, within the rest of the step's budget, and
        look at each tile."""
        again, known = finite.in_tiles(recording, value, vectors)
        watch, given = finite.Watch(), self.options.plan
        budget = self.options.budget if given is None else given.budget or given.peak_bytes
        if budget is None:
            plan = self.planner.on_tiles(again)
        else:
            occupied = self.occupied(again)
            plan = self.planner.search(again, max(1, budget - occupied.bytes), occupied)
        if self.ledger is not None:
            self._place(plan, again, self.ledger)
        step = Step(self.ledger, None, self.options.folder, homes=self.homes, watch=watch)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            run_plan(plan, again.nodes, Frame(again.bindings, known, step))
        return watch.found()
