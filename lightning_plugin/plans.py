"""`Planner`: makes plans, remembers them for later steps, and saves them in checkpoints.

[Note: workspaces] On CUDA, libraries allocate workspaces of any size beside the results of operators. A plan leaves
room for some. If the device's allocator measures that the passes of a step took more than its budget, plans leave the
difference as additional room from the next step on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_plugin.boxes import Grid
from lightning_plugin.chain import chains
from lightning_plugin.errors import BudgetError, PlanError
from lightning_plugin.execute.validate import validate
from lightning_plugin.graph import Recording, approximation, background_of, has_drawn, image_gradient_bytes
from lightning_plugin.ledger import CallBytes, Ledger
from lightning_plugin.memory import budget_for, usable
from lightning_plugin.options import Options
from lightning_plugin.plan import Forecast, Plan
from lightning_plugin.planner import cache
from lightning_plugin.planner.analysis.background import parts_of_background
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.calibrate import local_rates
from lightning_plugin.planner.choose import choose_plan, choose_recipe, peak_of_calls
from lightning_plugin.planner.costs.lower import LowerTiers, lower_tiers
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.recipe import NEAR, Recipe, positions
from lightning_plugin.planner.search.policies import AUTO, with_halo
from lightning_plugin.program.fixed import fixed_plan
from lightning_plugin.program.key import recording_key
from lightning_plugin.team import Team
from lightning_plugin.units import ceil_mib, format_bytes

log = logging.getLogger("lightning_plugin")

#: Bytes held beside a network are rounded up to multiples of this part of the budget, so that one plan fits many steps.
OCCUPANCY_STEPS = 64
#: Number of image sizes whose plans are remembered. Plans for others are made from recipes again.
MAX_PLANS = 512

DIFFERENT_RECORDINGS = (
    "the ranks share an image and have not recorded the same step on it: the module does something else on one rank "
    'than on another. With split="image" a step may not depend on the rank.'
)


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Memory in use before a recording runs.

    Attributes:
        bytes: Live bytes on the device, without the recording's own tensors.
        excess: Bytes by which the step before exceeded its budget.
        ledger: The ledger, which knows the calls that wait for backward.
        optimizer_bytes: Bytes of optimizer state for each parameter, by the parameter's ``id``.
        tiers: Tiers of streamed tensors, by the tensor's ``id``.
    """

    bytes: int = 0
    excess: int = 0
    ledger: Ledger | None = None
    optimizer_bytes: Mapping[int, int] = field(default_factory=dict)
    tiers: Mapping[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class Planner:
    """Chooses the plan of a recording. It holds no tensors, so that it can be copied and saved in checkpoints.

    Attributes:
        options: The user's options.
        device: Type of the device whose rates predict times; None is the images' device.
        accumulates: Plan for steps that begin with gradients, even if there are none yet, so that one plan fits all
            steps of a training.
        team: The ranks that share an image's tiles; they have one plan.
        rates: Rates of the device. They are loaded once and kept, so that the plans of a run do not depend on when the
            device was calibrated.
        reserved: Bytes of the budget that optimizer states take.
        workspaces: Bytes of the budget left to libraries; None if no plan can leave as much as they took.
        plans: Plans made so far, by a digest of the recording.
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

    def find(self, recording: Recording, occupancy: Occupancy) -> Plan | None:
        """Return the user's plan, or the fastest plan made before that fits the memory left; see [Note: step] in
        `ledger`."""
        given, budget = self.options.plan, self.options.budget
        if given is not None:
            validate(given, recording)
            if given.approximation and self.options.splitting is None:
                raise PlanError(
                    f"the plan is for a network with {given.approximation}, and this one is exact: give the halo, "
                    "splits and split_depth it was made with, or make a plan without them"
                )
            return with_approximation(given, recording)
        if self.workspaces is not None and not occupancy.bytes and occupancy.excess:
            self.workspaces += occupancy.excess
            log.info(
                "a step took %s more than its budget: plans leave %s of it to the device's libraries from now on",
                format_bytes(occupancy.excess),
                format_bytes(self.workspaces),
            )
        room = None if budget is None else usable(budget - (self.workspaces or 0) - occupancy.bytes)
        fitting = [plan for plan in self._plans_for(recording) if room is None or plan.peak_bytes <= room]
        return min(fitting, key=lambda plan: plan.seconds, default=None)

    def make(self, recording: Recording, occupancy: Occupancy) -> Plan:
        """Make a new plan, and remember it."""
        budget = self.options.budget
        if budget is None:
            plan = self.plan_fixed_tiles(recording)
        else:
            plan = replace(self._search_with_workspaces(recording, budget, occupancy), budget=budget)
        self._plans_for(recording).append(plan)
        if self.team is not None:
            self.team.require_equal(plan.to_json(), DIFFERENT_RECORDINGS)
        return plan

    def _plans_for(self, recording: Recording) -> list[Plan]:
        """Return the list of plans for recordings like this one; an unsaved list if each step draws its splits."""
        gradients = self.options.budget is not None and not self.accumulates  # fixed tiles do not depend on them
        key = recording_digest(recording, gradients)
        if self.team is not None:
            self.team.require_equal(key, DIFFERENT_RECORDINGS)
        if has_drawn(recording.nodes):
            return []
        return put_last(self.plans, key, self.plans.get(key, []), MAX_PLANS)

    def plan_fixed_tiles(self, recording: Recording) -> Plan:
        """Make a plan with the numbers of tiles that the user gave."""
        options = self.options
        forward = Grid(options.tiles) if options.tiles else None
        backward = Grid(options.backward_tiles) if options.backward_tiles else None
        alike = forward is not None and bool(background_parts(recording))
        plan = fixed_plan(recording.nodes, forward, backward, halo=options.halo, alike=alike)
        if options.half == "device":
            plan = replace(plan, segments=tuple(replace(s, half=not s.keep) for s in plan.segments))
        return with_approximation(plan, recording)

    def _search_with_workspaces(self, recording: Recording, budget: int, occupancy: Occupancy) -> Plan:
        """Search a plan that leaves room for libraries (see [Note: workspaces]); if there is none, leave no room from
        now on."""
        if self.workspaces:
            try:
                return self._search_remaining(recording, budget - self.workspaces, occupancy)
            except BudgetError:
                self.workspaces = None
        return self._search_remaining(recording, budget, occupancy)

    def _search_remaining(self, recording: Recording, budget: int, occupancy: Occupancy) -> Plan:
        """Search a plan for the part of the budget that is not occupied, rounded down if there is such a plan."""
        held, ledger = occupancy.bytes, occupancy.ledger
        if not held:
            return self.search(recording, budget, occupancy, self.options.calls)
        calls = 0 if ledger is None else len(ledger.calls)
        left = max(1, self.options.calls - calls)
        rounded = -(-held * OCCUPANCY_STEPS // budget) * budget // OCCUPANCY_STEPS
        try:
            return self.search(recording, max(1, budget - rounded), occupancy, left)
        except BudgetError as refused:
            if refused.smallest <= budget - held:
                return self.search(recording, budget - held, occupancy, left)
            smallest = refused.smallest + held
            if ledger is not None:
                forecast = Forecast(plain_bytes=Network(recording).plain_bytes)
                whole = call_bytes(recording, forecast, occupancy.optimizer_bytes)
                smallest = max(smallest, budget_for(ledger.bytes_to_keep_all(whole)))
            together = self._smallest(recording, occupancy, calls + 1)
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the step holds {format_bytes(held)} already for other "
                "calls, images or losses. Call backward on earlier results first, or give the number of calls before a "
                f"backward, TiledModule(..., calls={calls + 1}): {calls + 1} calls like this one then need "
                f"{ceil_mib(together)}, since the first leave room for the others. Without that, give at least "
                f"{ceil_mib(smallest)}. For this call alone: {refused}",
                smallest,
                refused.operator,
            ) from refused

    def _smallest(self, recording: Recording, occupancy: Occupancy, calls: int) -> int:
        """Return the smallest budget for a number of calls that wait for one backward."""
        try:
            return budget_for(self.search(recording, 1, occupancy, calls).peak_bytes)
        except BudgetError as refused:
            return refused.smallest

    def search(self, recording: Recording, budget: int, occupancy: Occupancy, calls: int = 1) -> Plan:
        """Search a plan within the part of a budget that optimizer states of other parameters leave.

        Args:
            recording: The recording.
            budget: The budget, without occupied bytes.
            occupancy: Memory in use.
            calls: Number of calls that wait for one backward.
        """
        others = self.reserved - sum(occupancy.optimizer_bytes.get(id(t), 0) for t in recording.tensors)
        try:
            plan = self._search(recording, max(1, budget - others), occupancy, calls)
        except BudgetError as refused:
            if not others:
                raise
            smallest = refused.smallest + others
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the optimizers will take {format_bytes(others)} for "
                f"parameters that this step does not use. Give at least {ceil_mib(smallest)}. For a step without "
                f"them: {refused}",
                smallest,
                refused.operator,
            ) from refused
        if others:
            plan = replace(plan, forecast=replace(plan.forecast, peak_bytes=plan.peak_bytes + others))
        # One rank may have a plan from a recipe and another one from a search: all take the first rank's.
        return plan if self.team is None else Plan.from_json(self.team.all_gather(plan.to_json())[0])

    def _search(self, recording: Recording, budget: int, occupancy: Occupancy, calls: int) -> Plan:
        images = recording.images
        device = self.device or (images[0].device.type if images else "cpu")
        self.rates = self.rates or local_rates(device)
        lower = lower_tiers(device, self.options)
        policy = with_halo(AUTO, self.options.halo)
        network = Network(recording, self.accumulates, dict(occupancy.optimizer_bytes), dict(occupancy.tiers))
        shape = tuple(images[0].source.shape) if images else ()
        if has_drawn(recording.nodes) or any(chains(recording.nodes)):
            plan = choose_plan(network, self.rates, budget, lower, policy, calls)
            return with_approximation(replace(plan, shape=shape), recording)
        network_key = (
            recording_key(recording, not self.accumulates, sized=False),
            [(t.shape, t.dtype) for t in recording.tensors if isinstance(t, nn.Parameter)],
            self.accumulates, budget, calls, repr((self.rates, lower, policy)), background_parts(recording),
            tuple(map(network.optimizer_bytes, network.captured)), network.unrecorded_bytes,
        )  # fmt: skip
        tiers = tuple(network.below.get(id(t)) for t in recording.tensors)
        plan_of_recipe = apply_recipes(self._recipes_for(network_key, tiers), network, lower, budget, calls)
        if plan_of_recipe is None:
            recipe = choose_recipe(network, self.rates, budget, lower, policy, calls)
            plan_of_recipe = recipe.plan
            for key_tiers in dict.fromkeys((tiers, tiers_after(recipe.plan, recording))):  # also for the next step
                recipes = self._recipes_for(network_key, key_tiers)
                recipes.append(recipe)
                cache.keep(cache.key_of(network_key, key_tiers), recipes)
        return with_approximation(replace(plan_of_recipe, shape=shape), recording)

    def _recipes_for(self, network_key: tuple[Any, ...], tiers: tuple[str | None, ...]) -> list[Recipe]:
        """Return the recipes for a network whose tensors live on these tiers."""
        key = cache.key_of(network_key, tiers)
        recipes = self._recipes.get(key)
        return put_last(self._recipes, key, cache.load(key) if recipes is None else recipes, MAX_PLANS)

    def reserve(self, size: int, new_fit: bool = False) -> None:
        """Leave bytes of the budget to optimizer states. The reserve never shrinks, except for a new fit; plans made
        with another reserve are forgotten."""
        if size > self.reserved or (new_fit and size != self.reserved):
            self.reserved = size
            self.plans.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return plans, rates, and the options they were made for, as plain types, for a checkpoint."""
        return {
            **self._limits(),
            "approximation": self.options.approximation,
            "plans": {key: [plan.to_json() for plan in plans] for key, plans in self.plans.items()},
            "rates": None if self.rates is None else asdict(self.rates),
        }

    def _limits(self) -> dict[str, Any]:
        options = {name: value for name, value in asdict(self.options).items() if name != "plan"}
        return {"options": options, "device": self.device}

    def load_state_dict(self, state: dict[str, Any], has_user_limits: bool = True) -> bool:
        """Load the plans of a checkpoint if they were made under the same options; return True if they were.

        Args:
            state: Result of `state_dict`.
            has_user_limits: The user gave a budget or tiles. A budget that was measured is taken from the checkpoint,
                since another number of bytes is free now.
        """
        approximation = self.options.approximation
        if (former := state.get("approximation", "")) != approximation:
            log.warning(
                "the checkpoint was trained %s, and the run goes on %s",
                f"with {former}" if former else "exactly",
                f"with {approximation}" if approximation else "exactly",
            )
        budget = state.get("options", state).get("budget")  # older checkpoints have no "options"
        if not has_user_limits and budget is not None:
            self.options = replace(self.options, budget=budget)
        saved = asdict(Options()) | state.get("options", {})  # older checkpoints lack some options
        options = {name: value for name, value in saved.items() if name != "plan"}
        is_same = "options" in state and self._limits() == {"options": options, "device": state.get("device")}
        if is_same:
            try:
                self.plans |= {key: [Plan.from_json(text) for text in texts] for key, texts in state["plans"].items()}
            except PlanError as error:  # another version wrote them
                log.warning("the checkpoint's plans are made again: %s", error)
            drop_first(self.plans, MAX_PLANS)
            if state.get("rates") is not None:
                self.rates = Rates(**state["rates"])
        return is_same


def call_bytes(
    recording: Recording, forecast: Forecast, optimizer_bytes: Mapping[int, int], on_device: Sequence[Tensor] = ()
) -> CallBytes:
    """Return the bytes of a call by the forecast of its plan.

    Args:
        recording: The call.
        forecast: The forecast. Plain PyTorch saves ``plain_bytes`` for the call, images included.
        optimizer_bytes: Bytes of optimizer state for each parameter, by the parameter's ``id``.
        on_device: The captured tensors that are not streamed.
    """
    tensors = recording.tensors
    weights = {id(t): t.nbytes * (2 if t.requires_grad else 1) + optimizer_bytes.get(id(t), 0) for t in tensors}
    images = sum(t.nbytes for image in recording.images if (t := image.on_device) is not None)
    return CallBytes(
        weights, max(0, forecast.plain_bytes - images), image_gradient_bytes(recording), forecast.reserve_bytes,
        forecast.peak_bytes, forecast.held_bytes, sum(t.nbytes for t in on_device if t.requires_grad and t.is_leaf),
    )  # fmt: skip


def tiers_after(plan: Plan, recording: Recording) -> tuple[str | None, ...]:
    """Return the tier of each tensor after a plan has run; None for the device."""
    captures, below = recording.bindings.captures, dict[int, str]()
    for tier, places in (("host", plan.on_host), ("disk", plan.on_disk)):
        below |= {id(captures[recording.nodes[place].outputs[0]].tensor): tier for place in places}
    return tuple(below.get(id(t)) for t in recording.tensors)


def background_parts(recording: Recording) -> tuple[int, ...]:
    """Return the shares of background of the images, coarsely rounded: plans depend on them."""
    return parts_of_background(background_of(recording.images))


def with_approximation(plan: Plan, recording: Recording) -> Plan:
    """Return the plan with the approximation in a recording named."""
    found = approximation(recording.nodes)
    return plan if plan.approximation == found else replace(plan, approximation=found)


def apply_recipes(
    recipes: Sequence[Recipe], network: Network, lower: LowerTiers, budget: int, calls: int
) -> Plan | None:
    """Make a plan by the recipe for the nearest image size that keeps the budget and fits the lower tiers.

    A recipe that failed for an image is not tried for larger ones.
    """
    size, room = positions(network.nodes), usable(budget)
    for recipe in sorted(recipes, key=lambda recipe: recipe.distance(network.nodes)):
        if recipe.distance(network.nodes) > NEAR:
            break
        if size >= recipe.too_large:
            continue
        plan = recipe.at(network, lower, room)
        if plan is not None and peak_of_calls(plan, network, calls) <= room:
            return plan
        recipe.too_large = size
    return None


def recording_digest(recording: Recording, gradients: bool) -> str:
    """Digest a recording with its contents as far as plans depend on them; once for each of the latter.

    Args:
        recording: The recording.
        gradients: Include which parameters have a gradient already.
    """
    captures = recording.bindings.captures.items()
    with_grad = frozenset(v for v, c in captures if gradients and c.tensor.is_leaf and c.tensor.grad is not None)
    unrecorded = [(p.nbytes, p.requires_grad, p.grad is None) for p in recording.unrecorded]
    key = "digest", gradients, with_grad, background_parts(recording), *unrecorded
    if key not in recording.derived:
        recording.derived[key] = digest((recording_key(recording, gradients), *key[3:]))
    return recording.derived[key]  # type: ignore[no-any-return]


def structure_digest(recording: Recording) -> str:
    """Digest a network without sizes: equal for images of any size."""
    return digest(recording_key(recording, gradients=False, sized=False))


@lru_cache(16)
def digest(description: tuple[Any, ...]) -> str:
    """Digest a description, equally in every process."""
    return hashlib.sha256(repr(description).encode()).hexdigest()


K = TypeVar("K")
V = TypeVar("V")


def put_last(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Put an entry last, and drop the first ones if there are more than ``most``."""
    known.pop(key, None)
    known[key] = value
    drop_first(known, most)
    return value


def drop_first(known: dict[K, V], most: int) -> None:
    """Drop the first entries beyond ``most``: a cohort may have as many image sizes as slides."""
    while len(known) > most:
        del known[next(iter(known))]
