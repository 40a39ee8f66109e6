"""What the user said about how to run, and what came of it.

[Note: workspaces] On CUDA, libraries take memory beside what operators make, as much as they like. A plan leaves room
for some. Where the device's allocator has seen a step take more than its budget, plans leave that much more from the
next step on.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_plugin.boxes import Grid
from lightning_plugin.chain import chains
from lightning_plugin.errors import BudgetError, EngineError, PlanError
from lightning_plugin.execute import finite
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.execute.validate import validate
from lightning_plugin.graph import Value
from lightning_plugin.ledger import CallBytes, Ledger, with_gradients
from lightning_plugin.memory import Heap, budget_for, usable
from lightning_plugin.ops import Barrier
from lightning_plugin.options import Chains, Options
from lightning_plugin.passes import forget_failed
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.background import parts_of_background
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.calibration.calibrate import local_rates
from lightning_plugin.planner.choose import choose_plan, choose_recipe, together
from lightning_plugin.planner.costs.lower import Lower, lower_tiers
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.recipes import shelf
from lightning_plugin.planner.recipes.recipe import NEAR, Recipe, positions
from lightning_plugin.planner.search.policies import AUTO, with_halo
from lightning_plugin.program.compiled import Compiler
from lightning_plugin.program.findings import Library
from lightning_plugin.program.fixed import fixed
from lightning_plugin.program.key import recording_key
from lightning_plugin.progress import Progress
from lightning_plugin.recording import Recording, Rewriting, approximation, background_of, drawn, image_gradient_bytes
from lightning_plugin.residency.homes import Homes, move
from lightning_plugin.residency.host import make_room_for_pinned
from lightning_plugin.team import Team
from lightning_plugin.units import exact_bytes, format_bytes

log = logging.getLogger("lightning_plugin")

#: What is held beside a network is rounded up to such a part of the budget, so that a plan does for many steps.
STEPS = 64
#: Bytes that may be left of a step that is over: losses and other numbers that somebody keeps.
SCRAPS = 1024
#: Sizes whose plans are remembered; others are looked up in recipes again.
MOST_PLANS = 512


@dataclass(eq=False)
class Settings:
    """How the next recordings are to be run.

    ``options`` are the user's. ``device`` names the one whose rates rank the plans; ``given`` is a plan of the user's
    own. ``accumulates``: plan for steps that begin with gradients, also where there are none yet, so that one plan does
    for all steps of a training. ``team`` are the ranks that share an image's tiles, where there are several.
    ``rates`` are the device's, found when they are first needed and then kept, so that a run's plans do not depend on
    when it was calibrated. ``reserved`` is the part of the budget that optimizers take, ``left`` the part that is left
    to what steps were found to take beyond the budget; see [Note: workspaces]. ``plan`` is the last plan that
    ran, ``ledger`` what its step used where a budget is kept. ``progress`` tells of steps while they last,
    ``library`` is what they have found of tiles, ``compiler`` what compiles their tapes. ``homes`` are where streamed
    tensors live, ``owed`` is what optimizers keep for each tensor, by identity. ``non_finite`` is the first operator
    whose result was not finite, in the first step whose loss was not.
    """

    options: Options = field(default_factory=Options)
    device: str | None = None
    given: Plan | None = None
    accumulates: bool = False
    team: Team | None = None
    rates: Rates | None = field(default=None, init=False)
    plan: Plan | None = field(default=None, init=False)
    ledger: Ledger | None = field(default=None, init=False)
    barriers: tuple[str, ...] = field(default=(), init=False)
    reserved: int = field(default=0, init=False)
    left: int | None = field(default=0, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    library: Library = field(default_factory=Library, init=False)
    homes: Homes = field(default_factory=Homes, init=False)
    compiler: Compiler | None = field(default=None, init=False)
    owed: dict[int, int] = field(default_factory=dict, init=False)
    _non_finite: finite.NonFinite | None = field(default=None, init=False)
    _looks: WeakSet[finite.Look] = field(default_factory=WeakSet, init=False)
    _plans: dict[Any, list[Plan]] = field(default_factory=dict, init=False)
    _recipes: dict[Any, list[Recipe]] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy begins with, a deep one or one in another process: what the user said. What came of it is about
        tensors that a copy has not, and their memory."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return said | {"rates": self.rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rates = state.pop("rates")
        self.__dict__.update(type(self)(**state).__dict__)
        self.rates = rates

    def __str__(self) -> str:
        """The options that are not the usual ones."""
        usual = Options()
        given = [(f.name, getattr(self.options, f.name)) for f in fields(Options)]
        words = [f"{name}={value!r}" for name, value in given if value != getattr(usual, name)]
        return ", ".join(words if self.given is None else ["plan=...", *words]) or "no options"

    def same(self, other: Any) -> bool:
        """Whether others say the same."""
        return isinstance(other, Settings) and (self.options, self.given) == (other.options, other.given)

    @property
    def splitting(self) -> Rewriting | None:
        """How the network is split, if it is."""
        return self.options.splitting

    @property
    def chains(self) -> Chains:
        """Whether long runs of equal links become chains: for a budget, or for a plan that has some."""
        if self.given is not None:
            return "always" if self.given.chains else "never"
        return self.options.chains if self.options.budget is not None else "never"

    def choose(self, recording: Recording) -> Plan:
        forget_failed()
        if self.given is not None:
            validate(self.given, recording)
            if self.given.approximation and self.splitting is None:
                raise PlanError(
                    f"the plan is for a network with {self.given.approximation}, and this one is exact: give the halo, "
                    "splits and split_depth it was made with, or make a plan without them"
                )
            return marked(self.given, recording)
        options = self.options
        if options.budget is None:
            return self.on_tiles(recording)

        if drawn(recording.nodes):  # the next step's splits are others, and so is what their tiles need
            return self.within([], recording, options.budget)
        key = recording_key(recording, gradients=not self.accumulates), background(recording)
        known = put_last(self._plans, key, self._plans.get(key, []), MOST_PLANS)
        return self.within(known, recording, options.budget)

    def on_tiles(self, recording: Recording) -> Plan:
        """The plan where the user says how many tiles there are."""
        options = self.options
        forward = Grid(options.tiles) if options.tiles else None
        backward = Grid(options.backward_tiles) if options.backward_tiles else None
        alike = forward is not None and bool(background(recording))
        return marked(fixed(recording.nodes, forward, backward, halo=options.halo, alike=alike), recording)

    def within(self, known: list[Plan], recording: Recording, budget: int) -> Plan:
        """The fastest of the known plans that fits beside what the step holds already, or a new one; see [Note: step]
        in `ledger`."""

        def fitting() -> list[Plan]:
            return [plan for plan in known if plan.peak_bytes <= usable(budget - (self.left or 0) - held)]

        held = self.beside(recording)
        if held > SCRAPS and not fitting():
            gc.collect()  # what only waits for it is not held
            held = self.beside(recording)
        held = held if held > SCRAPS else 0
        if not held and self.left is not None:
            self.left += self.excess()
        found = fitting()
        if not found:
            found = [replace(self.with_workspaces(recording, budget, held), budget=budget)]
            known += found
        return min(found, key=lambda plan: plan.seconds)

    def excess(self) -> int:
        """What the step before has taken beyond the budget."""
        return 0 if self.ledger is None else self.ledger.excess

    def with_workspaces(self, recording: Recording, budget: int, held: int) -> Plan:
        """A plan that leaves room for what steps were found to take beyond their budget, or, where none does, one
        without, from now on."""
        if self.left:
            try:
                return self.beside_others(recording, budget - self.left, held)
            except BudgetError:
                self.left = None
        return self.beside_others(recording, budget, held)

    def beside_others(self, recording: Recording, budget: int, held: int) -> Plan:
        """A plan within what is left of a budget: if it can be, of a little less."""

        calls = 0 if self.ledger is None else len(self.ledger.calls)
        if not held:
            return self.search(recording, budget, self.options.calls)
        left = max(1, self.options.calls - calls)
        rounded = -(-held * STEPS // budget) * budget // STEPS
        try:
            return self.search(recording, max(1, budget - rounded), left)
        except BudgetError as refused:
            if refused.smallest <= budget - held:
                return self.search(recording, budget - held, left)
            smallest = refused.smallest + held
            if self.ledger is not None:
                whole = self.whole(recording, Network(recording).plain_bytes)
                smallest = max(smallest, budget_for(self.ledger.whole_step(whole)))
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the step holds {format_bytes(held)} already for other "
                "calls, images or losses. Pull back what was computed before, or say how many calls wait for one "
                f"backward (TiledModule(..., calls={calls + 1})), so that the first leave room for the others. Without "
                f"that, give at least {exact_bytes(smallest)}. For this call alone: {refused}",
                smallest,
                refused.operator,
            ) from refused

    def beside(self, recording: Recording) -> int:
        """What is on the device beside what some nodes use."""
        return 0 if self.ledger is None else self.ledger.beside(tensors_of(recording))

    def search(self, recording: Recording, budget: int, calls: int = 1) -> Plan:
        """A plan within a budget, for so many calls that wait for one backward."""

        images = recording.images
        device = self.device or (images[0].device.type if images else "cpu")
        self.rates = self.rates or local_rates(device)
        lower = lower_tiers(device, self.options)
        policy = with_halo(AUTO, self.options.halo)
        described = repr((self.rates, lower, policy))
        network = Network(recording, self.accumulates, self.owed, self.tiers_of(recording))
        shape = tuple(images[0].source.shape) if images else ()
        if drawn(recording.nodes) or any(chains(recording.nodes)):
            plan = choose_plan(network, self.rates, budget, lower, policy, calls)
            return marked(replace(plan, shape=shape), recording)
        weights = [(t.shape, t.dtype) for t in tensors_of(recording) if isinstance(t, nn.Parameter)]
        about = shelf.key_of(
            recording_key(recording, not self.accumulates, sized=False), weights, self.accumulates, budget, calls,
            described, background(recording),
            tuple(network.below.get(id(t)) for t in tensors_of(recording)),
            tuple(map(network.owes, network.captured)),
        )  # fmt: skip
        recipes = self._recipes.get(about)
        recipes = put_last(self._recipes, about, shelf.load(about) if recipes is None else recipes, MOST_PLANS)
        found = known_for(recipes, network, lower, budget, calls)
        if found is None:
            recipes.append(choose_recipe(network, self.rates, budget, lower, policy, calls))
            found = recipes[-1].plan
            shelf.keep(about, recipes)
        return marked(replace(found, shape=shape), recording)

    def tiers_of(self, recording: Recording) -> dict[int, str]:
        """The tiers of the tensors that live below the device, by identity."""
        return {id(t): tier for t in tensors_of(recording) if (tier := self.homes.tier(t)) is not None}

    def places(self, tensor: Tensor) -> bool:
        """Whether a plan says where a tensor on the CPU is to live: under a budget, a parameter need not be where the
        image is."""
        free = self.options.budget is not None and self.options.parameters != "device"
        return tensor in self.homes or (free and isinstance(tensor, nn.Parameter))

    def settle(self, plan: Plan, recording: Recording, ledger: Ledger) -> None:
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

    def begin(self, plan: Plan, recording: Recording) -> Step:
        """Note what is about to run, and open the step's page of the ledger."""
        before, self.plan = self.plan, plan
        self.barriers = tuple(n.label for n in recording.nodes if isinstance(n.op, Barrier))
        images = recording.images
        device = images[0].device if images else torch.device("cpu")
        if self.ledger is None or self.ledger.device != device:
            self.ledger = Ledger(device)
        self.homes.folder = self.options.folder
        size = sum(segment.forecast.stored_bytes for segment in plan.segments if segment.tier == "host")
        if size and device.type == "cuda" and before != plan:
            make_room_for_pinned(size, lower_tiers(device.type, self.options).host or 0)
        self.settle(plan, recording, self.ledger)
        if self.beside(recording) <= SCRAPS:
            self.ledger.begin()
        self.ledger.limit = self.options.budget
        budget = self.options.budget
        if self.options.trim and budget is not None and device.type == "cpu":
            self.ledger.heap = self.ledger.heap or Heap(budget)
            self.ledger.heap.budget = budget  # which may be another than the last step's
        for image in images:
            for t in with_gradients([] if image.tensor is None else [image.tensor]):
                self.ledger.ignore(t)
        for tensor in tensors_of(recording):
            if tensor not in self.homes:
                self.ledger.hold(tensor)
        if self.compiler is None and self.options.compile != "never":
            self.compiler = Compiler(self.options.compile)
        step = Step(
            self.ledger, self.team, self.options.folder, self.progress, library=self.library, homes=self.homes,
            compiler=self.compiler,
        )  # fmt: skip
        self.ledger.calls[step] = self.whole(recording, plan.forecast.plain_bytes, plan.forecast.reserve_bytes)
        return step

    def whole(self, recording: Recording, plain: int, workspaces: int = 0) -> CallBytes:
        """What a call holds that is run whole, where plain PyTorch saves ``plain`` bytes, images included."""
        weights = {
            id(t): t.nbytes * (2 if t.requires_grad else 1) + self.owed.get(id(t), 0) for t in tensors_of(recording)
        }
        here = sum(t.nbytes for image in recording.images if (t := image.here) is not None)
        return CallBytes(weights, max(0, plain - here), image_gradient_bytes(recording), workspaces)

    def look(self, recording: Recording, values: Sequence[Value], vectors: Mapping[Value, Tensor]) -> None:
        """Have it found out in backward whether a loss is finite; see [Note: non-finite] in `execute.finite`."""
        results = finite.followed(values, vectors)
        if self._non_finite is not None or not results:
            return
        look = finite.Look(results, recording, vectors)
        self._looks.add(look)
        for t in results:
            t.register_hook(lambda _: self.read(look))

    @property
    def non_finite(self) -> finite.NonFinite | None:
        for look in list(self._looks):
            self.read(look)
        return self._non_finite

    def read(self, look: finite.Look) -> None:
        """Where a loss is not finite, find the operator that was the first to make something that is not, once, and
        say so."""
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
        if found is None and self.team is not None:
            more = " (its tiles lie on several ranks, and are not looked at)"
        elif found is None:
            try:
                found = self.look_in_tiles(recording, value, known)
            except EngineError as refused:
                more = f" (its tiles are not looked at: {refused})"
        self._non_finite = found or finite.NonFinite(how, finite.named(node))
        log.warning("what is trained for is not finite: %s%s", self._non_finite, more)

    def look_in_tiles(
        self, recording: Recording, value: Value, vectors: Mapping[Value, Tensor]
    ) -> finite.NonFinite | None:
        """Run what a vector that is not finite is made of once more, within what the step has left of the budget, and
        look at each tile."""
        again, known = finite.in_tiles(recording, value, vectors)
        ran, watch = self.plan, finite.Watch()
        budget = self.options.budget if self.given is None else self.given.budget or self.given.peak_bytes
        left = None if budget is None else max(1, budget - self.beside(again))
        plan = self.on_tiles(again) if left is None else self.search(again, left)
        if self.ledger is not None:
            self.settle(plan, again, self.ledger)
        step = Step(self.ledger, None, self.options.folder, homes=self.homes, watch=watch)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            run_plan(plan, again.nodes, Frame(again.bindings, known, step))
        self.plan = ran
        return watch.found()


def background(recording: Recording) -> tuple[int, ...]:
    """Coarse shares of background of the images, for which a plan is made."""
    return parts_of_background(background_of(recording.images))


def marked(plan: Plan, recording: Recording) -> Plan:
    """A plan that says what is approximate in what it runs."""
    found = approximation(recording.nodes)
    return plan if plan.approximation == found else replace(plan, approximation=found)


def known_for(recipes: Sequence[Recipe], network: Network, lower: Lower, budget: int, calls: int) -> Plan | None:
    """What the recipe for the nearest size comes to, of those that keep the budget and for whose maps there is room
    below. One that did not for an image is not asked about larger ones."""
    size, room = positions(network.nodes), usable(budget)
    for recipe in sorted(recipes, key=lambda recipe: recipe.distance(network.nodes)):
        if recipe.distance(network.nodes) > NEAR:
            break
        if size >= recipe.too_large:
            continue
        plan = recipe.at(network, lower, room)
        if plan is not None and together(plan, network, calls) <= room:
            return plan
        recipe.too_large = size
    return None


def tensors_of(recording: Recording) -> list[Tensor]:
    """The tensors that a network uses: parameters, buffers, whatever was captured."""
    return [capture.tensor for capture in recording.captures]


K = TypeVar("K")
V = TypeVar("V")


def put_last(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Put an entry last, and let go of the first where there are more than ``most``."""
    known.pop(key, None)
    known[key] = value
    shorten(known, most)
    return value


def shorten(known: dict[K, V], most: int) -> None:
    """Let go of the first entries beyond ``most``: slides have as many sizes as there are slides."""
    while len(known) > most:
        del known[next(iter(known))]
