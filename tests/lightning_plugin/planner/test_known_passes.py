"""A rehearsal that knows passes from before finds what one finds that runs them all."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from lightning_plugin import LazyImage
from lightning_plugin.capture.lazy import session_of
from lightning_plugin.execute.rehearsal import Likeness, Pass, Passes
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.rehearsal.account import Account
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from lightning_plugin.recording import Recording
from tests.lightning_plugin.networks import AnyPlan, Case, cases, plans

QUIET = {"deadline": None, "phases": [Phase.generate], "database": None, "suppress_health_check": list(HealthCheck)}


class Forgetful(Passes):
    """Knows nothing of what it was told."""

    def get(self, likeness: Likeness) -> Pass | None:
        return None


def recorded(case: Case) -> tuple[Recording, Any]:
    """One step of a network, recorded, and what has to live as long as that."""
    images = [LazyImage.from_tensor(torch.zeros(s, dtype=torch.float64)) for s in case.shapes]
    results = [r.sum() for r in case.net(*images)]
    return session_of(results).recorded([r._value for r in results]), (images, results)


def agree(recording: Recording, choices: list[AnyPlan]) -> int:
    """Rehearse plans, each after those before it, and each on its own; how many passes were known in the end."""
    one = Network(recording)
    for choice in choices:
        plan = choice.choose(recording)
        alone = rehearse(plan, Network(recording, passes=Forgetful()))
        same(rehearse(plan, one), alone)
        count = len(one.passes.known)
        same(rehearse(plan, one), alone)
        assert len(one.passes.known) == count
    return len(one.passes.known)


def same(known: Account, true: Account) -> None:
    """What is added up from traces may be too much by the rows that some things lack, and never too little."""
    for field in dataclasses.fields(Account):
        found, there = getattr(known, field.name), getattr(true, field.name)
        pairs = [(found[k], there[k]) for k in there] if isinstance(there, dict) else [(found, there)]
        assert not isinstance(there, dict) or found.keys() == there.keys()
        assert all(b <= a <= 1.01 * b for a, b in pairs), (field.name, found, there)


def run(examples: int, fixed: int | None) -> None:
    @settings(max_examples=examples, **QUIET)
    @given(cases(), st.lists(plans(), min_size=1, max_size=2))
    def every(case: Case, more: list[AnyPlan]) -> None:
        recording, alive = recorded(case)
        agree(recording, [case.plan, *more])
        for image in alive[0]:
            image._session.root().abandon()

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.parametrize("fixed", [0, None])
def test_what_is_known_is_what_would_be_found(fixed: int | None) -> None:
    run(6, fixed)


@pytest.mark.full
def test_what_is_known_is_what_would_be_found_of_a_thousand() -> None:
    run(1000, 1)


def sizes(examples: int, fixed: int | None) -> int:
    """Rehearse random networks at several sizes on grids of tiles of several sizes, knowing what was rehearsed before;
    how many passes were added up from traces."""
    added = 0

    @settings(max_examples=examples, **QUIET)
    @given(cases(), plans(), st.integers(0, 2**32))
    def every(case: Case, choice: AnyPlan, draw: int) -> None:
        nonlocal added
        rng, passes = random.Random(draw), Counting()
        for _ in range(5):
            grown = tuple((*s[:2], *(n + rng.randint(0, 40) for n in s[2:])) for s in case.shapes)
            if len(set(case.shapes)) == 1:
                grown = (grown[0],) * len(grown)
            if not takes(case, grown):
                continue
            recording, alive = recorded(dataclasses.replace(case, shapes=grown))
            plan = choice.choose(recording)
            alone = rehearse(plan, Network(recording, passes=Forgetful()))
            same(rehearse(plan, Network(recording, passes=passes)), alone)
            for image in alive[0]:
                image._session.root().abandon()
        added += passes.added

    (seed(fixed)(every) if fixed is not None else every)()
    return added


def takes(case: Case, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a network runs at these sizes: some reshape to the sizes that they were made for."""
    try:
        with torch.no_grad():
            copy.deepcopy(case.net)(*(torch.zeros(s, dtype=torch.float64) for s in shapes))
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


class Counting(Passes):
    """Counts the passes that were added up from traces."""

    added = 0

    def get(self, likeness: Likeness) -> Pass | None:
        known = likeness.same in self.known
        found = super().get(likeness)
        self.added += found is not None and not known
        return found


@pytest.mark.parametrize("fixed", [0, None])
def test_what_is_added_up_is_what_would_be_found(fixed: int | None) -> None:
    assert sizes(5, fixed) or fixed is None


@pytest.mark.full
def test_what_is_added_up_is_what_would_be_found_of_five_hundred() -> None:
    assert sizes(500, 1) > 500


def test_equal_blocks_are_run_once() -> None:
    block = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    net = nn.Sequential(nn.Conv2d(3, 4, 1), *(layer for _ in range(6) for layer in block))
    image = LazyImage.from_tensor(torch.zeros(1, 3, 40, 36))
    result = net(image).sum()
    recording = result._session.root().recorded([result._value])
    plan = AnyPlan(grids=((3, 2, 1),)).choose(recording)
    network = Network(recording)
    rehearse(plan, network)
    known = len(network.passes.known)
    assert known < len(plan.segments), (known, len(plan.segments))
    image._session.root().abandon()


def test_a_count_of_one_tile_is_counted_as_a_sum_of_counts_is() -> None:
    image = LazyImage.from_tensor(torch.zeros(1, 1, 4))
    result = nn.BatchNorm1d(1, affine=False, track_running_stats=False)(image).square().sum()
    recording = result._session.root().recorded([result._value])
    plans = [AnyPlan(grids=(grid,)) for grid in ((1, 1, 1), (2, 1, 1))]
    agree(recording, plans)
    image._session.root().abandon()
