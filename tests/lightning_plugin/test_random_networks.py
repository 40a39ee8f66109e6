"""Random networks under random plans give what plain PyTorch gives: output, loss, every gradient, every buffer.

The sampled run repeats a fixed set of networks and adds a few fresh ones; the full run draws a thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from tests.exactness import TOLERANCE
from tests.lightning_plugin.compared import Step, differences, wrong
from tests.lightning_plugin.networks import Case, cases

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Tally:
    """What was run: how many networks, operators and axes, the largest error, and how many needed leniency."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.largest = 0.0

    def check(self, case: Case) -> None:
        try:
            plain = Step(case, None)
        except RuntimeError:  # PyTorch refuses the network: something needed for backward was overwritten
            self.counts["refused by PyTorch"] += 1
            assume(False)
        tiled = Step(case, case.plan)
        if not plain.loss.isfinite():  # a variance over one value, say: PyTorch's own result is no number
            assert not tiled.loss.isfinite(), "tiled is a number where plain PyTorch is none"
            self.counts["not finite in PyTorch"] += 1
            assume(False)
        found = differences(tiled, plain)
        errors = wrong(case, found)
        assert not errors, f"tiled and plain differ: {errors}"
        worst = max(found.values(), default=0.0)
        self.counts["networks"] += 1
        self.counts[f"{len(case.shapes[0]) - 2}-D"] += 1
        self.counts["with shared halos"] += case.plan.scans > 0
        self.counts["with transfers ahead"] += case.plan.transfers > 0
        self.counts["with dropped maps"] += case.plan.drops > 0
        self.counts["with recalled maps"] += case.plan.recalls > 0
        self.counts["with streamed parameters"] += case.plan.streamed > 0
        self.counts["with a barrier"] += bool(case.plan.noted)
        self.counts["badly conditioned"] += worst >= TOLERANCE
        self.steps.update(getattr(getattr(s, "func", None), "__name__", type(s).__name__) for s in case.net.steps)
        if worst < TOLERANCE:
            self.largest = max(self.largest, worst)

    def result(self) -> dict[str, Any]:
        return {**self.counts, "largest error": self.largest, "operators": dict(self.steps.most_common())}


def run(tally: Tally, examples: int, fixed: int | None) -> None:
    phases = [Phase.generate, Phase.shrink]

    @settings(max_examples=examples, derandomize=False, phases=phases, **QUIET)
    @given(cases())
    def every(case: Case) -> None:
        tally.check(case)

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.parametrize("fixed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_sampled_networks_are_exact(fixed: int) -> None:
    tally = Tally()
    run(tally, 20, fixed)
    assert tally.counts["networks"] >= 12


def test_fresh_networks_are_exact() -> None:
    """Other networks in every run; a failure prints the network, and how to draw it again."""
    run(Tally(), 12, None)


@pytest.mark.full
def test_a_thousand_networks_are_exact(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    tally = Tally()
    for part in range(10):
        run(tally, 110, 100 + part)
    assert tally.counts["networks"] >= 1000
    assert tally.counts["badly conditioned"] <= 0.02 * tally.counts["networks"]
    record_result("exactness_random", tally.result())
