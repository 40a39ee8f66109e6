"""The engine: runs recordings, and owns the state that outlives a step.

State has three owners: `Options` are the user's and never change; `Planner` makes plans and remembers them; `Engine`
holds the ledger, the homes of streamed tensors and the programs of tiles.
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

from lightning_plugin.capture.transcript import Transcripts
from lightning_plugin.errors import EngineError
from lightning_plugin.execute import finite
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Recording, Value, has_drawn
from lightning_plugin.ledger import Ledger, with_gradients
from lightning_plugin.memory import Heap
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner.costs.lower import lower_tiers
from lightning_plugin.planner.costs.parameters import sources_of_spread_maps
from lightning_plugin.plans import Occupancy, Planner, call_bytes, structure_digest
from lightning_plugin.private import after_backward, release_failed_passes
from lightning_plugin.program.compiled import Compiler
from lightning_plugin.program.findings import Library
from lightning_plugin.progress import Progress
from lightning_plugin.residency.disk import check_space
from lightning_plugin.residency.homes import Homes, move_to_device
from lightning_plugin.residency.tiers import make_room_for_pinned

log = logging.getLogger("lightning_plugin")

#: Bytes beside a recording that planning ignores: losses and other numbers that the user keeps from earlier steps.
IGNORED_BYTES = 1024


class PlanListener(Protocol):
    """Listener of plans."""

    def on_new_plan(self, plan: Plan, structure: str, random_splits: bool = False) -> None:
        """Called with a new plan, before it runs.

        Args:
            plan: The plan.
            structure: Digest of the network; equal for images of other sizes.
            random_splits: The network is split at other places in each step, so that each step has a new plan.
        """

    def on_plan_run(self, plan: Plan, recording: Recording, ranks: int = 1) -> None:
        """Called before each run of a plan, with the number of ranks that share its tiles."""


@dataclass(eq=False)
class Engine:
    """Runs the recordings of one module, or of one strategy.

    Attributes:
        planner: Chooses plans by the user's options.
        plan: The last plan that ran.
        ledger: Counts the bytes of the step on the device.
        progress: Calls the listeners of running steps.
        library: Programs of tiles from earlier steps.
        transcripts: Calls of earlier steps.
        homes: Memory of streamed tensors, on all tiers.
        compiler: Compiles tapes, if the user wants it.
        optimizer_bytes: Bytes of optimizer state for each parameter, by the parameter's ``id``.
        listener: Listener of plans.
        module: The module whose parameters lie on the device, whether or not a step reads them.
    """

    planner: Planner = field(default_factory=Planner)
    plan: Plan | None = field(default=None, init=False)
    ledger: Ledger | None = field(default=None, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    library: Library = field(default_factory=Library, init=False)
    transcripts: Transcripts = field(default_factory=Transcripts, init=False)
    homes: Homes = field(default_factory=Homes, init=False)
    compiler: Compiler | None = field(default=None, init=False)
    optimizer_bytes: dict[int, int] = field(default_factory=dict, init=False)
    listener: PlanListener | None = field(default=None, init=False)
    module: nn.Module | None = field(default=None, init=False)
    _non_finite: finite.NonFinite | None = field(default=None, init=False)
    _pending_checks: WeakSet[finite.FiniteCheck] = field(default_factory=WeakSet, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor's arguments: all other state is about tensors that a copy does not have."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(type(self)(**state).__dict__)

    @property
    def options(self) -> Options:
        return self.planner.options

    @property
    def module_parameters(self) -> list[Tensor]:
        """The module's parameters, without those that are streamed."""
        return [] if self.module is None else [p for p in self.module.parameters() if p not in self.homes]

    # Before a step

    def choose(self, recording: Recording) -> Plan:
        """Choose the plan for a recording, within the memory that the device has left: a known one, or a new one."""
        release_failed_passes()
        self._take_back_lasting(recording)
        occupancy = Occupancy() if self.options.budget is None else self.occupancy(recording)
        plan = self.planner.find(recording, occupancy)
        if plan is None and occupancy.bytes:
            gc.collect()  # some of the bytes may be garbage
            occupancy = self.occupancy(recording)
            plan = self.planner.find(recording, occupancy)
        if plan is None:
            plan = self.planner.make(recording, occupancy)
            if self.listener is not None:
                random_splits = has_drawn(recording.nodes)
                structure = plan.approximation if random_splits else structure_digest(recording)
                self.listener.on_new_plan(plan, structure, random_splits)
        return plan

    def _take_back_lasting(self, recording: Recording) -> None:
        """Move streamed tensors of which the recording makes maps that last back to the device."""
        if not self.homes:
            return
        if "lasting" not in recording.derived:
            recording.derived["lasting"] = sources_of_spread_maps(recording.nodes)
        captures = recording.bindings.captures
        for v in recording.derived["lasting"]:
            if v in captures and captures[v].tensor in self.homes:
                self.homes.take_back(captures[v].tensor, v.device)

    def occupancy(self, recording: Recording) -> Occupancy:
        """Measure the device's memory beside the tensors of a recording; the maximum of ranks that share an image."""
        ledger, team = self.ledger, self.planner.team
        tiers = {id(t): tier for t in recording.tensors if (tier := self.homes.tier(t)) is not None}
        if ledger is None:
            beside = excess = 0
        else:
            beside, excess = ledger.bytes_beside(recording.tensors), ledger.excess
            beside += sum(call.saved for token, call in ledger.calls.items() if not isinstance(token, Step))
        if team is not None:
            beside, excess = (max(ranks) for ranks in zip(*team.all_gather((beside, excess)), strict=True))
        return Occupancy(beside if beside > IGNORED_BYTES else 0, excess, ledger, self.optimizer_bytes, tiers)

    def can_move(self, tensor: Tensor) -> bool:
        """True if a plan may move a tensor that lies on the CPU: a streamed one, or under a budget a parameter."""
        free = self.options.budget is not None and self.options.parameters != "device"
        return tensor in self.homes or (free and isinstance(tensor, nn.Parameter))

    def begin_step(self, plan: Plan, recording: Recording) -> Step:
        """Move parameters to the tiers of a plan, and prepare the ledger for the step."""
        options, images = self.options, recording.images
        until_backward = plan.trains and self.planner.team is None
        if (size := plan.stored_on("disk")) and until_backward and not any(image.background for image in images):
            check_space(size, options.folder, "maps")  # else the step would end after hours, where the disk is full
        if self.listener is not None:
            self.listener.on_plan_run(plan, recording, 1 if self.planner.team is None else self.planner.team.size)
        previous, self.plan = self.plan, plan
        self.library.runs += 1
        device = images[0].device if images else torch.device("cpu")
        if self.ledger is None or self.ledger.device != device:
            self.ledger = Ledger(device)
        self.homes.folder = options.folder
        if (size := plan.stored_on("host")) and device.type == "cuda" and previous != plan:
            make_room_for_pinned(size, lower_tiers(device.type, options).host or 0)
        self._move_to_tiers(plan, recording, self.ledger)
        if not self.occupancy(recording).bytes:
            self.ledger.begin()
        self.ledger.limit = options.budget
        if options.trim and options.budget is not None and device.type == "cpu":
            self.ledger.heap = self.ledger.heap or Heap(options.budget)
            self.ledger.heap.budget = options.budget  # may differ from the last step's
        for image in images:
            for t in with_gradients([] if image.tensor is None else [image.tensor]):
                self.ledger.ignore(t)
        for tensor in recording.tensors:
            if tensor not in self.homes:
                self.ledger.count_existing(tensor)
                self.ledger.hook_gradients(tensor)
        if self.compiler is None and options.compile != "never":
            self.compiler = Compiler(options.compile)
        step = Step(
            self.ledger, self.planner.team, options.folder, self.progress, library=self.library, homes=self.homes,
            compiler=self.compiler,
        )  # fmt: skip
        self.ledger.calls[step] = call_bytes(
            recording, plan.forecast, self.optimizer_bytes, [t for t in recording.tensors if t not in self.homes]
        )
        return step

    def _move_to_tiers(self, plan: Plan, recording: Recording, ledger: Ledger) -> None:
        """Move captured tensors to the tiers of a plan; a tensor that is streamed already stays on its tier."""
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
                self.homes.place(capture.tensor, tier, node.outputs[0].device)
            elif self.can_move(capture.tensor):
                move_to_device(capture.tensor, node.outputs[0].device)
        self.homes.release_pages()

    # After a step

    @property
    def peak_bytes(self) -> int:
        """The measured peak of the last step (until the next one's forward), in bytes, with optimizer states."""
        if self.ledger is None:
            return 0
        streamed_state = sum(self.optimizer_bytes.get(id(t), 0) for t in self.homes)
        return self.ledger.peak_bytes + self.planner.reserved - streamed_state

    def watch_loss(self, recording: Recording, values: Sequence[Value], vectors: Mapping[Value, Tensor]) -> None:
        """Hook losses, to note the peak after backward, and to check in backward that they are finite; see
        [Note: non-finite] in `execute.finite`."""
        ledger = self.ledger
        if ledger is not None and ledger.uses_allocator:
            ledger.end_pass()
            for result in (vectors[v] for v in values if v in vectors):
                if result.grad_fn is not None:
                    result.register_hook(lambda _: after_backward(ledger.end_pass))
        results = finite.differentiable_results(values, vectors)
        if self._non_finite is not None or not results:
            return
        check = finite.FiniteCheck(results, recording, vectors)
        self._pending_checks.add(check)
        for t in results:
            t.register_hook(lambda _: self._check_loss(check))

    @property
    def non_finite(self) -> finite.NonFinite | None:
        """The first operator with a non-finite result, in the first step whose loss was not finite."""
        for check in list(self._pending_checks):
            self._check_loss(check)
        return self._non_finite

    def _check_loss(self, check: finite.FiniteCheck) -> None:
        """If the loss is not finite, find the first operator with a non-finite result, and log it."""
        if check not in self._pending_checks:
            return
        self._pending_checks.discard(check)
        recording, known = check.take_known()
        first = None
        if self._non_finite is None and check.is_non_finite():
            first = finite.first_vector(recording.nodes, known)
        if first is None:
            return
        node, value, how = first
        found, note = finite.find_untiled(recording.nodes, node, value, how), ""
        if found is None and self.planner.team is not None:
            note = " (its tiles were computed by several ranks and are not searched)"
        elif found is None:
            try:
                found = self._search_tiles(recording, value, known)
            except EngineError as error:
                note = f" (its tiles are not searched: {error})"
        self._non_finite = found or finite.NonFinite(how, finite.describe(node))
        log.warning("the loss is not finite: %s%s", self._non_finite, note)

    def _search_tiles(
        self, recording: Recording, value: Value, vectors: Mapping[Value, Tensor]
    ) -> finite.NonFinite | None:
        """Recompute a non-finite vector within the rest of the step's budget, and check each operator on each tile."""
        rerun, known = finite.recording_of(recording, value, vectors)
        watch, user_plan = finite.Watch(), self.options.plan
        budget = self.options.budget if user_plan is None else user_plan.budget or user_plan.peak_bytes
        if budget is None:
            plan = self.planner.plan_fixed_tiles(rerun)
        else:
            occupancy = self.occupancy(rerun)
            plan = self.planner.search(rerun, max(1, budget - occupancy.bytes), occupancy)
        if self.ledger is not None:
            self._move_to_tiers(plan, rerun, self.ledger)
        step = Step(self.ledger, None, self.options.folder, homes=self.homes, watch=watch)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            run_plan(plan, rerun, Frame(rerun.bindings, known, step))
        return watch.found()
