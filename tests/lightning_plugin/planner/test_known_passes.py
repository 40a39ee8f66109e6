"""A rehearsal that knows passes from before finds what one finds that runs them all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from lightning_plugin import LazyImage
from lightning_plugin.capture.lazy import session_of
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.rehearse import rehearse
from lightning_plugin.recording import Recording
from tests.lightning_plugin.networks import AnyPlan, Case, cases, plans

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Forgetful(dict[Hashable, Any]):
    """Knows nothing of what it was told."""

    def get(self, key: Hashable, default: Any = None) -> Any:
        return default


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
        alone = Network(recording, rehearsed=Forgetful())
        assert rehearse(plan, one) == rehearse(plan, alone), plan
        count = len(one.rehearsed)
        assert rehearse(plan, one) == rehearse(plan, alone), plan
        assert len(one.rehearsed) == count
    return len(one.rehearsed)


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


def test_equal_blocks_are_run_once() -> None:
    block = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    net = nn.Sequential(nn.Conv2d(3, 4, 1), *(layer for _ in range(6) for layer in block))
    image = LazyImage.from_tensor(torch.zeros(1, 3, 40, 36))
    result = net(image).sum()
    recording = result._session.root().recorded([result._value])
    plan = AnyPlan(grids=((3, 2, 1),)).choose(recording)
    network = Network(recording)
    rehearse(plan, network)
    known = len(network.rehearsed)
    assert known < len(plan.segments), (known, len(plan.segments))
    image._session.root().abandon()


def test_a_count_of_one_tile_is_counted_as_a_sum_of_counts_is() -> None:
    image = LazyImage.from_tensor(torch.zeros(1, 1, 4))
    result = nn.BatchNorm1d(1, affine=False, track_running_stats=False)(image).square().sum()
    recording = result._session.root().recorded([result._value])
    plans = [AnyPlan(grids=(grid,)) for grid in ((1, 1, 1), (2, 1, 1))]
    agree(recording, plans)
    image._session.root().abandon()
