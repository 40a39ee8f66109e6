"""The choice of a plan: the search estimates, a rehearsal decides.

The search predicts memory with a quick model; a rehearsal finds it exactly. If the rehearsed peak is over the limit,
the next search takes less by the difference; if it leaves much of the limit free, more. If no search finds a plan that
fits, the plan that needs least is rehearsed: it is the answer, or its peak is the smallest budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial

from lightning_plugin import ledger
from lightning_plugin.chain import Body
from lightning_plugin.errors import BarrierError, BudgetError
from lightning_plugin.graph import image_gradient_bytes
from lightning_plugin.memory import FREE_SHARE, RESERVE, budget_for, usable
from lightning_plugin.ops import Barrier
from lightning_plugin.plan import Plan
from lightning_plugin.plan_views import parts
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.chains import Chains, Way, seconds, with_peaks
from lightning_plugin.planner.costs.lower import LowerTiers
from lightning_plugin.planner.costs.parameters import Copies, Streamed, streamed_sets
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.overhead import without_gc
from lightning_plugin.planner.recipe import Recipe, with_rehearsed_bytes
from lightning_plugin.planner.rehearsal.rehearse import RehearsedMemory, rehearse
from lightning_plugin.planner.search.policies import AUTO, Policy
from lightning_plugin.planner.search.predict import recalls
from lightning_plugin.planner.search.search import Search
from lightning_plugin.units import ceil_mib, format_bytes

#: At most this share of a budget is left to the workspaces of the device's libraries.
WORKSPACE_SHARE = 0.125
#: More than any network needs.
PLENTY = 1 << 62
#: Cuts that a segment spans in the first search.
FIRST_SPAN = 4
#: The part of its seconds that a plan of longer segments has to save to be rehearsed, and to be made longer once more.
SMALL_GAIN, GAIN = 0.02, 0.05
#: A plan that takes this share of a limit leaves no room worth another search.
FULL = 0.95
#: Searches for one limit.
ROUNDS = 4
#: Bisections of the interval in which the smallest budget lies.
HALVINGS = 4
#: If everything fits and a step takes more than ``LONG_STEP`` seconds, smaller tiles that stay in a cache may be faster
#: by some percent, and are searched for. They are taken if they are predicted to take less than ``MUCH_FASTER`` of the
#: time: smaller gains are within the error of predictions.
LONG_STEP, MUCH_FASTER = 2.0, 0.95


@dataclass
class Chooser:
    """Plans for one network, under any budgets.

    Attributes:
        calls: The number of calls of a step that wait for one backward.
        rehearsed: All plans that were rehearsed.
        memory: The memory that their rehearsals found, by the decisions of the plan.
    """

    network: Network
    rates: Rates
    lower: LowerTiers
    policy: Policy = AUTO
    calls: int = 1
    rehearsed: list[Plan] = field(default_factory=list)
    memory: dict[Hashable, RehearsedMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.search = Search(self.network, self.rates, self.lower, self.policy)
        self.chains = Chains(self.network, partial(ways_of_link, self.rates, self.lower, self.policy))

    def choose(self, budget: int) -> Plan:
        """The fastest plan within the budget, or an error that says what would be enough."""
        reserve = self.reserve(budget)
        limit = usable(budget) - reserve
        self.refuse_barriers(limit)
        best = self.fastest(limit)
        if best is None:
            raise self.refusal(budget)
        return self.with_reserve(self.recalling(best, limit), budget)

    def recalling(self, plan: Plan, limit: int) -> Plan:
        """A plan that reads stored maps back in backward, everywhere or below the device only, if one of these keeps
        the limit; see [Note: recall] in `program.program`."""
        for more in recalls(plan, self.network, self.rates) if self.policy.recall else ():
            found = self.memory_of(more)
            if found.peak <= limit:
                return with_rehearsed_memory(more, found)
        return plan

    def with_reserve(self, plan: Plan, budget: int) -> Plan:
        """A rehearsed plan, with the reserve for the device's libraries."""
        reserve = self.reserve(budget)
        forecast = dataclasses.replace(plan.forecast, peak_bytes=plan.peak_bytes + reserve, reserve_bytes=reserve)
        return dataclasses.replace(plan, budget=budget, forecast=forecast)

    def choose_for_all(self, budget: int) -> Plan:
        """The fastest plan with which all calls of a step can wait for one backward."""
        whole = self.choose(budget)
        if self.peak_of_calls(whole) <= usable(budget):
            return whole
        smallest_plan, others = self.with_reserve(self.smallest_plan, budget), self.calls - 1
        # An equal share of the budget for each call is always enough; a smaller one may be.
        least = self.budget_for_peak(self.smallest_plan.peak_bytes)
        shared = budget - 2 * self.network.weight_gradient_bytes + others * self.network.fixed_bytes
        low, high = max(least, shared // self.calls), budget
        fitting = [p for p in (self.choose(low), smallest_plan) if self.peak_of_calls(p) <= usable(budget)]
        if not fitting:
            raise self.refusal(budget)
        best = min(fitting, key=by_seconds)
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            plan = self.choose(middle)
            if self.peak_of_calls(plan) <= usable(budget):
                low, best = middle, min(plan, best, key=by_seconds)
            else:
                high = middle
        return best

    def peak_of_calls(self, plan: Plan) -> int:
        """The peak of all calls that wait for one backward."""
        return peak_of_calls(plan, self.network, self.calls)

    def reserve(self, budget: int) -> int:
        """Bytes of a budget that are left to the workspaces of the device's libraries: the device's figure, but no more
        than a share of the budget, since workspaces grow with tiles."""
        return min(self.rates.workspace, int(WORKSPACE_SHARE * budget))

    def budget_for_peak(self, peak: int) -> int:
        """The smallest budget that leaves a plan ``peak`` bytes."""
        share = math.ceil((peak + RESERVE) / (1 - FREE_SHARE - WORKSPACE_SHARE)) + 2
        return min(budget_for(peak + self.rates.workspace), share)

    def refuse_barriers(self, limit: int) -> None:
        """Raise an error if the maps of one operator that runs whole exceed the limit alone."""
        for node in self.network.barriers:
            assert isinstance(node.op, Barrier)
            whole = sum(v.bytes for v in (*node.inputs, *node.outputs)) + self.least_fixed_bytes
            if whole > limit:
                # The maps around a barrier count too.
                smallest = self.budget_for_peak(max(whole, self.peak_of_calls(self.smallest_plan)))
                raise BarrierError(
                    f"{node.label} has to run whole: {node.op.reason}. Its maps and the parameters take "
                    f"{ceil_mib(whole)}, more than the budget. Give at least {ceil_mib(smallest)}, replace the "
                    "operator by one that has a rule (docs/operators.md), or add a rule for it "
                    "(lightning_plugin.rules.table says how).",
                    smallest,
                    node.label,
                )

    @cached_property
    def streamed_sets(self) -> list[Streamed]:
        """Sets of parameters that may live below the device, from the smallest."""
        return streamed_sets(self.network, self.lower)

    @cached_property
    def least_fixed_bytes(self) -> int:
        """Bytes that lie on the device all the time if as many parameters as possible live below."""
        return self.network.fixed_bytes - Copies(self.network, self.streamed_sets[-1], self.rates).freed

    def fastest(self, limit: int) -> Plan | None:
        """The fastest plan that keeps a limit.

        Its segments may span twice as many cuts as before until that makes it no faster: there are as many long
        intervals as short ones, each takes as long to cost as it is long, and few plans have any. If no plan of short
        segments keeps the limit, the smallest plan tells if any does.
        """
        self.search.span_limit = FIRST_SPAN
        best = self.with_fewest_streamed(limit)
        if best is None:
            best = dataclasses.replace(self.smallest_plan, budget=limit)
            if best.peak_bytes > limit:
                return None
            self.search.span_limit = FIRST_SPAN
        while self.search.span_limit < self.search.longest_span and not all(s.keep for s in best.segments):
            self.search.span_limit *= 2
            assert best.budget is not None
            self.search.stream(Streamed(best.on_host, best.on_disk), best.fetched_ahead)
            longer = self.search.run(best.budget)
            if longer is None:
                continue
            before = best.seconds - seconds(best.chains)
            if longer.seconds < (1 - SMALL_GAIN) * before:
                found = self.with_fewest_streamed(limit)
                best = best if found is None else min(best, found, key=by_seconds)
            if longer.seconds >= (1 - GAIN) * before:
                break
        return best

    def with_fewest_streamed(self, limit: int) -> Plan | None:
        """The faster of two plans: with as many parameters on the device as any plan allows, and with a share fewer.
        Copies are fetched ahead if that fits."""
        found: list[Plan] = []
        for streamed in self.streamed_sets:
            for ahead in (True, False) if streamed.all else (False,):
                self.search.stream(streamed, ahead)
                plan = None if self.search.fixed > limit else self.kept_or_tiled(limit)
                if plan is not None:
                    found.append(plan)
                    break
            if len(found) == 2 or (found and not streamed.all):
                break
        return min(found, key=by_seconds, default=None)

    def kept_or_tiled(self, limit: int, smallest: bool = False) -> Plan | None:
        """A plan whose rehearsal keeps a limit: everything kept, or tiles if that does not fit or they are faster. On
        the way to the ``smallest`` plan any will do."""
        whole = self.search.keep_everything(limit)
        best = None if whole is None else self.rehearsed_with_chains(whole, limit)
        if best is not None and best.peak_bytes > limit:
            best = None
        if best is not None and not self.tiles_may_win(best):
            return best
        tiled = self.tiled(limit, smallest)
        return tiled if best is None or (tiled is not None and tiled.seconds < MUCH_FASTER * best.seconds) else best

    def tiled(self, limit: int, smallest: bool) -> Plan | None:
        """The fastest plan of a few searches whose rehearsal keeps a limit.

        The first search may take the limit by its own estimate. The next one may take as much more or less as the
        rehearsal differs from the estimate. If a plan that fits is slower then than one that was too large, the next
        search may take the middle.
        """
        best, asked, fits, breaks, wanted = None, limit, 0, 0, math.inf
        for _ in range(ROUNDS):
            found = self.search.run(asked)
            if found is None:
                break
            plan = self.rehearsed_with_chains(found, limit)
            if plan.peak_bytes > limit:
                breaks, wanted = found.peak_bytes, plan.seconds
            else:
                fits, best = asked, plan if best is None else min(best, plan, key=by_seconds)
            if best is not None:
                has_room = asked == limit and plan.peak_bytes < FULL * limit <= found.peak_bytes
                is_slow = best.seconds > (1 + GAIN) * wanted
                if smallest or not (has_room or is_slow):
                    break
            asked = (fits + breaks) // 2 if fits and breaks else limit + found.peak_bytes - plan.peak_bytes
        return best

    def tiles_may_win(self, whole: Plan) -> bool:
        """True if tiles may be faster than everything at once by more than the time of a search."""
        return self.rates.near > self.rates.memory and whole.seconds > LONG_STEP

    def rehearsed_with_chains(self, plan: Plan, limit: int | None = None) -> Plan:
        """A rehearsed plan whose chains use the room that the limit leaves them; as little as possible if there is
        none."""
        if not self.chains:
            return self.with_rehearsal(plan)
        tiers = self.search.copies.tiers
        room = 0 if limit is None else limit - self.search.fixed
        for _ in range(ROUNDS):
            found = self.chains.within(room, tiers) if limit is not None else None
            chains = found if found is not None else self.chains.least(tiers)
            best = self.with_rehearsal(
                dataclasses.replace(plan, chains=chains, forecast=self.chains.forecast(plan, chains, tiers))
            )
            if found is None or limit is None or best.peak_bytes <= limit:
                break
            room -= best.peak_bytes - limit
        return best

    def with_rehearsal(self, plan: Plan) -> Plan:
        """A plan with the figures of its rehearsal in place of the estimates."""
        found = with_rehearsed_memory(plan, self.memory_of(plan))
        self.rehearsed.append(found)
        return found

    def memory_of(self, plan: Plan) -> RehearsedMemory:
        """The rehearsal of a plan."""
        key = decisions(plan)
        if key not in self.memory:
            self.memory[key] = rehearse(plan, self.network)
        return self.memory[key]

    @cached_property
    def smallest_plan(self) -> Plan:
        """The plan with the smallest rehearsed peak, to a few percent; it does not depend on the budgets asked for
        before."""
        self.search.stream(self.streamed_sets[-1])
        # Long segments need less memory only where short ones have to store their maps on the device.
        self.search.span_limit = FIRST_SPAN if self.search.offloads else math.inf
        low, high = self.search.fixed, max(2 * self.search.fixed, 1 << 20)
        while (found := self.search.run(high)) is None:
            low, high = high, high * 2
        while high - low > max(low // 100, 1 << 14):
            middle = (low + high) // 2
            smaller = self.search.run(middle)
            low, found = (middle, found) if smaller is None else (low, smaller)
            high = found.peak_bytes
        best = self.rehearsed_with_chains(found)
        for _ in range(HALVINGS):
            if best.peak_bytes <= low:
                break  # the search finds nothing there
            middle = (low + best.peak_bytes) // 2
            smaller = self.kept_or_tiled(middle, smallest=True)
            low, best = (middle, best) if smaller is None else (low, smaller)
        return best

    def parameters_sentence(self) -> str:
        """The sentence of an error about the bytes of parameters."""
        states = any(map(self.network.optimizer_bytes, self.network.captured))
        others = ", gradients and the optimizer's state" if states else " and gradients"
        every, here = format_bytes(self.network.fixed_bytes), format_bytes(self.least_fixed_bytes)
        if self.least_fixed_bytes == self.network.fixed_bytes:
            return f"Parameters{others} alone take {every}"
        return f"Of {every} of parameters{others}, {here} stay on the device; the rest is fetched where it is used"

    def refusal(self, budget: int) -> BudgetError:
        """The error that names the smallest budget."""
        plan = self.smallest_plan
        smallest = self.budget_for_peak(self.peak_of_calls(plan))
        operator = part_at_peak(plan)
        calls = f" for {self.calls} calls that wait for one backward" if self.calls > 1 else ""
        return BudgetError(
            f"no plan keeps {format_bytes(budget)}{calls}. The smallest budget that works is {ceil_mib(smallest)}; "
            f"'{operator}' sets it. {self.parameters_sentence()}.",
            smallest,
            operator,
        )


def ways_of_link(rates: Rates, lower: LowerTiers, policy: Policy, network: Network, body: Body) -> list[Way]:
    """Ways to run a link of a chain: whole, and within half as much memory, a quarter and so on, down to the least; of
    all plans that were rehearsed on the way, those that no other beats. Its parameters live where they do."""
    inner = Chooser(network, rates, dataclasses.replace(lower, parameters=()), policy)
    inner.search.stream(inner.streamed_sets[-1])
    whole = inner.search.keep_everything(PLENTY)
    limit = inner.with_rehearsal(whole).peak_bytes // 2 if whole is not None else 0
    while limit > inner.smallest_plan.peak_bytes:
        inner.kept_or_tiled(limit)
        limit //= 2
    found: list[Plan] = []
    for plan in sorted(inner.rehearsed, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not found or plan.seconds < found[-1].seconds:
            found.append(plan)
    return [Way.of(plan, network, body) for plan in found]


def by_seconds(plan: Plan) -> float:
    return plan.seconds


def with_rehearsed_memory(plan: Plan, found: RehearsedMemory) -> Plan:
    """A plan with what its rehearsal has found."""
    segments = tuple(
        dataclasses.replace(s, forecast=with_rehearsed_bytes(s.forecast, i, found)) for i, s in enumerate(plan.segments)
    )
    forecast = dataclasses.replace(plan.forecast, peak_bytes=found.peak, held_bytes=found.held)
    chains = with_peaks(plan.chains, found)
    return dataclasses.replace(plan, segments=segments, forecast=forecast, chains=chains)


def decisions(plan: Plan) -> Hashable:
    """The parts of a plan on which its rehearsal depends."""
    return plan.segments, plan.on_host, plan.on_disk, plan.fetched_ahead, plan.chains


def part_at_peak(plan: Plan) -> str:
    """The segment or chain at whose turn the peak of a plan is."""
    return max(parts(plan), key=lambda part: max(part.forward_bytes, part.backward_bytes)).path


def peak_of_calls(plan: Plan, network: Network, calls: int) -> int:
    """The peak of ``calls`` calls that wait for one backward. While one is pulled back, each other call holds what its
    backward needs or, once it was pulled back, the gradients of its images."""
    held = max(plan.forecast.held_bytes, image_gradient_bytes(network.recording))
    return ledger.peak_of_calls(plan.peak_bytes, [held] * (calls - 1), network.weight_gradient_bytes)


def choose_plan(
    network: Network, rates: Rates, budget: int, lower: LowerTiers, policy: Policy = AUTO, calls: int = 1
) -> Plan:
    """The fastest plan within the budget, or an error that names the smallest."""
    return chosen(Chooser(network, rates, lower, policy, calls), budget)


def choose_recipe(
    network: Network, rates: Rates, budget: int, lower: LowerTiers, policy: Policy = AUTO, calls: int = 1
) -> Recipe:
    """The same as a recipe, for other sizes too."""
    return Recipe.of(choose_plan(network, rates, budget, lower, policy, calls), network)


def chosen(chooser: Chooser, budget: int) -> Plan:
    with without_gc():
        return chooser.choose_for_all(budget)
