"""The settings of a run: its plans are known by what they are for, survive the process, and are announced when new."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from lightning_plugin.errors import BudgetError, PlanError
from lightning_plugin.execute.frame import Step
from lightning_plugin.plan import Plan
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.program.key import recording_key
from lightning_plugin.recording import Recording, drawn
from lightning_plugin.settings import MOST_PLANS, Settings, put_last, shorten, tensors_of
from lightning_plugin.strategy.feedback import Feedback
from lightning_plugin.units import exact_bytes, format_bytes

log = logging.getLogger("lightning_plugin")

DIFFERENT = (
    "the ranks share an image and have not recorded the same step on it: the module does something else on one rank "
    'than on another. With split="image" a step may not depend on the rank.'
)


@dataclass(eq=False)
class RunSettings(Settings):
    """`Settings` whose plans can be saved, so that a resumed run goes on with the plans it had.

    ``ran`` are the plans of the step under way. ``roomy`` names the batches whose step the planner left whole: they
    need no recording. ``feedback`` hears of every new plan, and of every run of one.
    """

    chosen: bool = True
    accumulates: bool = True
    ran: list[Plan] = field(default_factory=list, init=False)
    plans: dict[str, list[Plan]] = field(default_factory=dict, init=False)
    roomy: dict[str, None] = field(default_factory=dict, init=False)
    feedback: Feedback = field(init=False)

    def __post_init__(self) -> None:
        self.feedback = Feedback(self.progress)

    def choose(self, recording: Recording) -> Plan:
        key = digest(recording)
        if self.team is not None:
            self.team.agree(key, DIFFERENT)
        once = drawn(recording.nodes)  # of plans for splits that no other step has, none is kept
        known = [] if once else put_last(self.plans, key, self.plans.get(key, []), MOST_PLANS)
        before = len(known)
        if self.given is None and self.options.budget is not None:
            plan = self.within(known, recording, self.options.budget)
        else:
            plan = known[0] if known else super().choose(recording)
            known[:] = [plan]
        if len(known) > before:  # it was made just now
            if self.team is not None:
                self.team.agree(plan.to_json(), DIFFERENT)
            network = plan.approximation if once else hashed(recording_key(recording, gradients=False, sized=False))
            self.feedback.announce(plan, network, alike=once)
        self.ran.append(plan)
        return plan

    def beside(self, recording: Recording) -> int:
        """Ranks that share an image go by the one that holds most."""
        held = super().beside(recording)
        return held if self.team is None else max(self.team.gather(held))

    def excess(self) -> int:
        """The most of all ranks that share an image, whose plans are one."""
        found = super().excess()
        return found if self.team is None else max(self.team.gather(found))

    def search(self, recording: Recording, budget: int, calls: int = 1) -> Plan:
        """A plan within what optimizers leave of a budget that keep something for parameters which are no part of this
        recording."""
        others = self.reserved - sum(self.owed.get(id(t), 0) for t in tensors_of(recording))
        try:
            plan = super().search(recording, max(1, budget - others), calls)
        except BudgetError as refused:
            if not others:
                raise
            smallest = refused.smallest + others
            raise type(refused)(
                f"no plan keeps {format_bytes(budget)}, of which the optimizers will take "
                f"{format_bytes(others)} for other parameters. Give at least {exact_bytes(smallest)}. "
                f"For a step without them: {refused}",
                smallest,
                refused.operator,
            ) from refused
        forecast = replace(plan.forecast, peak_bytes=plan.peak_bytes + others)
        plan = replace(plan, budget=budget, forecast=forecast)
        # Ranks that share an image may know its size from a formula or from a rehearsal: they go by the first.
        return plan if self.team is None else Plan.from_json(self.team.gather(plan.to_json())[0])

    def reserve(self, size: int, anew: bool = False) -> None:
        """Leave so much of the budget to optimizers, or more if more was left before, but for a fit that begins
        ``anew``; what was planned with another reserve is planned again."""
        if size > self.reserved or (anew and size != self.reserved):
            self.reserved = size
            self.plans.clear()

    @property
    def peak_bytes(self) -> int:
        """What the last step really held on the device at its worst moment, optimizers' state included."""
        if self.ledger is None:
            return 0
        return self.ledger.peak_bytes + self.reserved - sum(self.owed.get(id(t), 0) for t in self.homes)

    def begin(self, plan: Plan, recording: Recording) -> Step:
        self.feedback.runs(plan, 1 if self.team is None else self.team.size)
        return super().begin(plan, recording)

    @property
    def approximation(self) -> str:
        """What is approximate in the training, for a checkpoint and for people."""
        return "" if self.splitting is None else str(self.splitting)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain types."""
        return {
            **self.limits(),
            "approximation": self.approximation,
            "plans": {key: [plan.to_json() for plan in plans] for key, plans in self.plans.items()},
            "roomy": list(self.roomy),
            "rates": None if self.rates is None else asdict(self.rates),
        }

    def limits(self) -> dict[str, Any]:
        """What plans are made for: a checkpoint's serve a run with the same."""
        return {"options": asdict(self.options), "device": self.device}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept, where it was made under the same limits.

        A budget that was measured and not chosen is taken from the checkpoint: what is free now is another number.
        """
        if (before := state.get("approximation", "")) != self.approximation:
            log.warning(
                "the checkpoint was trained %s, and the run goes on %s",
                f"with {before}" if before else "exactly",
                f"with {self.approximation}" if self.approximation else "exactly",
            )
        former = state.get("options", state).get("budget")  # a checkpoint may be older than the options
        if not self.chosen and former is not None:
            self.options = replace(self.options, budget=former)
        if self.limits() == {name: state.get(name) for name in self.limits()}:
            try:
                self.plans |= {key: [Plan.from_json(text) for text in texts] for key, texts in state["plans"].items()}
            except PlanError as error:  # another version wrote them
                log.warning("the checkpoint's plans are made again: %s", error)
            self.roomy |= dict.fromkeys(state["roomy"])
            shorten(self.plans, MOST_PLANS)
            shorten(self.roomy, MOST_PLANS)
            if state.get("rates") is not None:
                self.rates = Rates(**state["rates"])


def digest(recording: Recording) -> str:
    """What two recordings share if and only if they can share a plan, as a text that is the same in every process."""
    return hashed(recording_key(recording, gradients=False))


@lru_cache(16)
def hashed(description: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(description).encode()).hexdigest()
