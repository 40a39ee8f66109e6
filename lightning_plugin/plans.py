"""Plans of a run: made where none that is known fits, remembered, and kept in checkpoints.

[Note: workspaces] On CUDA, libraries take memory beside what operators make, as much as they like. A plan leaves room
for some. Where the device's allocator has seen a step take more than its budget, plans leave that much more from the
next step on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn

from lightning_plugin.boxes import Grid
from lightning_plugin.chain import chains
from lightning_plugin.errors import BudgetError, PlanError
from lightning_plugin.execute.validate import validate
from lightning_plugin.graph import Recording, approximation, background_of, drawn, image_gradient_bytes
from lightning_plugin.ledger import CallBytes, Ledger
from lightning_plugin.memory import budget_for, usable
from lightning_plugin.options import Options
from lightning_plugin.plan import Plan
from lightning_plugin.planner import cache
from lightning_plugin.planner.analysis.background import parts_of_background
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.planner.choose import choose_plan, choose_recipe, together
from lightning_plugin.planner.costs.lower import LowerTiers, lower_tiers
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.recipe import NEAR, Recipe, positions
from lightning_plugin.planner.search.policies import AUTO, with_halo
from lightning_plugin.program.fixed import fixed
from lightning_plugin.program.key import recording_key
from lightning_plugin.team import Team
from lightning_plugin.units import ceil_mib, format_bytes

log = logging.getLogger("lightning_plugin")

#: Bytes held beside a network are rounded up to such a part of the budget, so that a plan does for many steps.
STEPS = 64
#: Sizes whose plans are remembered; others are looked up in recipes again.
MOST_PLANS = 512

DIFFERENT = (
    "the ranks share an image and have not recorded the same step on it: the module does something else on one rank "
    'than on another. With split="image" a step may not depend on the rank.'
)


@dataclass(frozen=True, eq=False)
class Occupancy:
    """The device as a plan finds it.

    Attributes:
        bytes: Live beside what the recording uses.
        excess: Bytes by which the step before has exceeded its budget.
        ledger: Knows the calls that wait for backward.
        optimizer_bytes: Bytes of optimizer state for each parameter, by the parameter's ``id``.
        tiers: The tiers of tensors that live below the device, by identity.
    """

    bytes: int = 0
    excess: int = 0
    ledger: Ledger | None = None
    optimizer_bytes: Mapping[int, int] = field(default_factory=dict)
    tiers: Mapping[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class Planner:
    """Decides by which plan a recording runs. Holds no tensor, so that copies and checkpoints can have its plans.

    Attributes:
        options: The user's.
        device: The one whose rates rank the plans; the images' own if None.
        accumulates: Plan for steps that begin with gradients, also where there are none yet, so that one plan does for
            all steps of a training.
        team: The ranks that share an image's tiles, whose plans are one.
        rates: The device's. They are found when they are first needed and then kept, so that a run's plans do not
            depend on when the device was calibrated.
        reserved: Bytes of the budget that optimizers take.
        workspaces: Bytes of the budget left to libraries; None where no plan can leave as much as they took.
        plans: Known plans, by a digest of what they are for.
    """

    options: Options = field(default_factory=Options)
    device: str | None = None
    accumulates: bool = False
    team: Team | None = None
    rates: Rates | None = field(default=None, init=False)
    reserved: int = field(default=0, init=False)
    workspaces: int | None = field(default=0, init=False)
    plans: dict[str, list[Plan]] = field(default_factory=dict, init=False)
    _recipes: dict[Any, list[Recipe]] = field(default_factory=dict, init=False)

    def known(self, recording: Recording, occupancy: Occupancy) -> Plan | None:
        """The fastest plan that was made before and fits beside what the device holds; see [Note: step] in `ledger`."""
        given, budget = self.options.plan, self.options.budget
        if given is not None:
            validate(given, recording)
            if given.approximation and self.options.splitting is None:
                raise PlanError(
                    f"the plan is for a network with {given.approximation}, and this one is exact: give the halo, "
                    "splits and split_depth it was made with, or make a plan without them"
                )
            return marked(given, recording)
        if self.workspaces is not None and not occupancy.bytes:
            self.workspaces += occupancy.excess
        room = None if budget is None else usable(budget - (self.workspaces or 0) - occupancy.bytes)
        fitting = [plan for plan in self._kept(recording) if room is None or plan.peak_bytes <= room]
        return min(fitting, key=lambda plan: plan.seconds, default=None)

    def make(self, recording: Recording, occupancy: Occupancy) -> Plan:
        """A new plan, which is known from now on."""
        budget = self.options.budget
        if budget is None:
            plan = self.on_tiles(recording)
        else:
            plan = replace(self._with_workspaces(recording, budget, occupancy), budget=budget)
        self._kept(recording).append(plan)
        if self.team is not None:
            self.team.require_equal(plan.to_json(), DIFFERENT)
        return plan

    def _kept(self, recording: Recording) -> list[Plan]:
        """The list of plans for recordings like this. Plans for splits that no other step has are not kept."""
        gradients = self.options.budget is not None and not self.accumulates  # their memory is no matter to fixed tiles
        key = digest((recording_key(recording, gradients), background(recording)))
        if self.team is not None:
            self.team.require_equal(key, DIFFERENT)
        if drawn(recording.nodes):
            return []
        return put_last(self.plans, key, self.plans.get(key, []), MOST_PLANS)

    def on_tiles(self, recording: Recording) -> Plan:
        """The plan where the user says how many tiles there are."""
        options = self.options
        forward = Grid(options.tiles) if options.tiles else None
        backward = Grid(options.backward_tiles) if options.backward_tiles else None
        alike = forward is not None and bool(background(recording))
        return marked(fixed(recording.nodes, forward, backward, halo=options.halo, alike=alike), recording)

    def _with_workspaces(self, recording: Recording, budget: int, occupancy: Occupancy) -> Plan:
        """A plan that leaves room for what steps were found to take beyond their budget, or, where none does, one
        without, from now on."""
        if self.workspaces:
            try:
                return self._beside_others(recording, budget - self.workspaces, occupancy)
            except BudgetError:
                self.workspaces = None
        return self._beside_others(recording, budget, occupancy)

    def _beside_others(self, recording: Recording, budget: int, occupancy: Occupancy) -> Plan:
        """A plan within the rest of a budget: if it can be, of a little less."""
        held, ledger = occupancy.bytes, occupancy.ledger
        if not held:
            return self.search(recording, budget, occupancy, self.options.calls)
        calls = 0 if ledger is None else len(ledger.calls)
        left = max(1, self.options.calls - calls)
        rounded = -(-held * STEPS // budget) * budget // STEPS
        try:
            return self.search(recording, max(1, budget - rounded), occupancy, left)
        except BudgetError as refused:
            if refused.smallest <= budget - held:
                return self.search(recording, budget - held, occupancy, left)
            smallest = refused.smallest + held
            if ledger is not None:
                whole = whole_call(recording, Network(recording).plain_bytes, occupancy.optimizer_bytes)
                smallest = max(smallest, budget_for(ledger.whole_step(whole)))
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the step holds {format_bytes(held)} already for other "
                "calls, images or losses. Pull back what was computed before, or say how many calls wait for one "
                f"backward (TiledModule(..., calls={calls + 1})), so that the first leave room for the others. Without "
                f"that, give at least {ceil_mib(smallest)}. For this call alone: {refused}",
                smallest,
                refused.operator,
            ) from refused

    def search(self, recording: Recording, budget: int, occupancy: Occupancy, calls: int = 1) -> Plan:
        """A plan for so many calls that wait for one backward, within what optimizers leave of a budget that keep
        something for parameters which are no part of this recording."""
        others = self.reserved - sum(occupancy.optimizer_bytes.get(id(t), 0) for t in recording.tensors)
        try:
            plan = self._search(recording, max(1, budget - others), occupancy, calls)
        except BudgetError as refused:
            if not others:
                raise
            smallest = refused.smallest + others
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the optimizers will take "
                f"{format_bytes(others)} for other parameters. Give at least {ceil_mib(smallest)}. "
                f"For a step without them: {refused}",
                smallest,
                refused.operator,
            ) from refused
        if others:
            plan = replace(plan, forecast=replace(plan.forecast, peak_bytes=plan.peak_bytes + others))
        # Ranks that share an image may know its size from a recipe or from a search: they go by the first.
        return plan if self.team is None else Plan.from_json(self.team.all_gather(plan.to_json())[0])

    def _search(self, recording: Recording, budget: int, occupancy: Occupancy, calls: int) -> Plan:
        images = recording.images
        device = self.device or (images[0].device.type if images else "cpu")
        self.rates = self.rates or local_rates(device)
        lower = lower_tiers(device, self.options)
        policy = with_halo(AUTO, self.options.halo)
        network = Network(recording, self.accumulates, dict(occupancy.optimizer_bytes), dict(occupancy.tiers))
        shape = tuple(images[0].source.shape) if images else ()
        if drawn(recording.nodes) or any(chains(recording.nodes)):
            plan = choose_plan(network, self.rates, budget, lower, policy, calls)
            return marked(replace(plan, shape=shape), recording)
        network_key = (
            recording_key(recording, not self.accumulates, sized=False),
            [(t.shape, t.dtype) for t in recording.tensors if isinstance(t, nn.Parameter)],
            self.accumulates, budget, calls, repr((self.rates, lower, policy)), background(recording),
            tuple(map(network.owes, network.captured)),
        )  # fmt: skip
        tiers = tuple(network.below.get(id(t)) for t in recording.tensors)
        found = known_for(self._recipes_of(network_key, tiers), network, lower, budget, calls)
        if found is None:
            recipe = choose_recipe(network, self.rates, budget, lower, policy, calls)
            found = recipe.plan
            for where in dict.fromkeys((tiers, tiers_after(found, recording))):  # the next step finds tensors moved
                recipes = self._recipes_of(network_key, where)
                recipes.append(recipe)
                cache.keep(cache.key_of(network_key, where), recipes)
        return marked(replace(found, shape=shape), recording)

    def _recipes_of(self, network_key: tuple[Any, ...], tiers: tuple[str | None, ...]) -> list[Recipe]:
        """The recipes for a network whose tensors live on these tiers."""
        about = cache.key_of(network_key, tiers)
        recipes = self._recipes.get(about)
        return put_last(self._recipes, about, cache.load(about) if recipes is None else recipes, MOST_PLANS)

    def reserve(self, size: int, anew: bool = False) -> None:
        """Leave so much of the budget to optimizers, or more if more was left before, but for a fit that begins
        ``anew``; what was planned with another reserve is planned again."""
        if size > self.reserved or (anew and size != self.reserved):
            self.reserved = size
            self.plans.clear()

    def state(self) -> dict[str, Any]:
        """Plans, and what they were made for, in plain types, for a checkpoint."""
        return {
            **self._limits(),
            "approximation": self.options.approximation,
            "plans": {key: [plan.to_json() for plan in plans] for key, plans in self.plans.items()},
            "rates": None if self.rates is None else asdict(self.rates),
        }

    def _limits(self) -> dict[str, Any]:
        said = {name: value for name, value in asdict(self.options).items() if name != "plan"}
        return {"options": said, "device": self.device}

    def load(self, state: dict[str, Any], chosen: bool = True) -> bool:
        """Take up what a checkpoint kept, where it was made under the same limits; True if it was.

        Args:
            state: From `state`.
            chosen: The budget was chosen by the user. One that was measured is taken from the checkpoint: what is free
                now is another number.
        """
        here = self.options.approximation
        if (before := state.get("approximation", "")) != here:
            log.warning(
                "the checkpoint was trained %s, and the run goes on %s",
                f"with {before}" if before else "exactly",
                f"with {here}" if here else "exactly",
            )
        former = state.get("options", state).get("budget")  # a checkpoint may be older than the options
        if not chosen and former is not None:
            self.options = replace(self.options, budget=former)
        kept = asdict(Options()) | state.get("options", {})  # which may be older than some options
        said = {name: value for name, value in kept.items() if name != "plan"}
        same = "options" in state and self._limits() == {"options": said, "device": state.get("device")}
        if same:
            try:
                self.plans |= {key: [Plan.from_json(text) for text in texts] for key, texts in state["plans"].items()}
            except PlanError as error:  # another version wrote them
                log.warning("the checkpoint's plans are made again: %s", error)
            shorten(self.plans, MOST_PLANS)
            if state.get("rates") is not None:
                self.rates = Rates(**state["rates"])
        return same


def whole_call(recording: Recording, plain: int, optimizer_bytes: Mapping[int, int], workspaces: int = 0) -> CallBytes:
    """Bytes of a call that is run whole, where plain PyTorch saves ``plain`` bytes, images included."""
    tensors = recording.tensors
    weights = {id(t): t.nbytes * (2 if t.requires_grad else 1) + optimizer_bytes.get(id(t), 0) for t in tensors}
    here = sum(t.nbytes for image in recording.images if (t := image.here) is not None)
    return CallBytes(weights, max(0, plain - here), image_gradient_bytes(recording), workspaces)


def tiers_after(plan: Plan, recording: Recording) -> tuple[str | None, ...]:
    """The tier of each tensor once a plan has run; None for the device."""
    captures, below = recording.bindings.captures, dict[int, str]()
    for tier, places in (("host", plan.on_host), ("disk", plan.on_disk)):
        below |= {id(captures[recording.nodes[place].outputs[0]].tensor): tier for place in places}
    return tuple(below.get(id(t)) for t in recording.tensors)


def background(recording: Recording) -> tuple[int, ...]:
    """Coarse shares of background of the images, for which a plan is made."""
    return parts_of_background(background_of(recording.images))


def marked(plan: Plan, recording: Recording) -> Plan:
    """A plan that names the approximation in what it runs."""
    found = approximation(recording.nodes)
    return plan if plan.approximation == found else replace(plan, approximation=found)


def known_for(recipes: Sequence[Recipe], network: Network, lower: LowerTiers, budget: int, calls: int) -> Plan | None:
    """The plan by the recipe for the nearest size, of those that keep the budget and for whose maps there is room
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


def tables_of(recording: Recording) -> str:
    """A digest that recordings share whose plans are told as one: they differ in sizes only."""
    return digest(recording_key(recording, gradients=False, sized=False))


@lru_cache(16)
def digest(description: tuple[Any, ...]) -> str:
    """A text that stands for a description, the same in every process."""
    return hashlib.sha256(repr(description).encode()).hexdigest()


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
