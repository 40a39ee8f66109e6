"""A plan whose step exceeds its budget is a fault, in whatever test it happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_plugin.engine import IGNORED_BYTES, Engine
from lightning_plugin.execute.frame import Step
from lightning_plugin.graph import Recording
from lightning_plugin.ledger import Ledger
from lightning_plugin.plan import Plan
from lightning_plugin.planner.cache import VARIABLE
from lightning_plugin.planner.costs import cost

#: On CUDA, smaller budgets are not looked at: the allocator rounds each tensor up, and a library's workspace is larger.
LEAST = 256 * 2**20


class Watch:
    """Looks at each ledger when its step is over: when the next begins, and at the end of the test."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[Plan, Ledger | None]] = {}

    def over(self, engine: Engine) -> None:
        plan, ledger = self.steps.pop(id(engine), (None, None))
        if plan is not None and ledger is not None and plan.budget is not None:
            if ledger.uses_allocator and plan.budget < LEAST:
                return
            # What is left of a step that is over, a loss or so, may lie beside the next, and no plan knows of it.
            held = ledger.peak_bytes
            assert held <= plan.budget + IGNORED_BYTES, f"a step held {held} bytes under {plan}"


@pytest.fixture
def free_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where tiles cost nothing beside what they compute, so that a small network has many."""
    monkeypatch.setattr(cost, "TILE", (0, 0))
    monkeypatch.setattr(cost, "STEP", (0, 0))


@pytest.fixture(scope="module", autouse=True)
def searched_plans() -> Iterator[None]:
    """No plan is looked up, also where a process has run tests of commands before, which share theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        yield


@pytest.fixture(scope="module")
def shared_plans(searched_plans: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the tests of a module look up the plans that others of them searched for: where plans are not the point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture(autouse=True)
def every_step_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests look at each step, users at the first of its kind: see [Note: watched] in `ledger`."""
    monkeypatch.setattr(Ledger, "watch_all", True)


@pytest.fixture(autouse=True)
def steps_keep_their_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    watch, begin_step = Watch(), Engine.begin_step
    known: list[Engine] = []  # so that no identity is given anew

    def watched(self: Engine, plan: Plan, recording: Recording) -> Step:
        watch.over(self)
        step = begin_step(self, plan, recording)
        known.append(self)
        watch.steps[id(self)] = plan, step.ledger
        return step

    monkeypatch.setattr(Engine, "begin_step", watched)
    yield
    for engine in known:
        watch.over(engine)
