"""A plan found for one size serves others: it is exact there, keeps the budget, and is looked up and not searched."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_plugin.execute.rehearsal
import lightning_plugin.planner.recipes.recipe
import lightning_plugin.settings
from lightning_plugin import TiledModule
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import choose_recipe
from lightning_plugin.planner.costs.lower import Lower, lower_tiers
from lightning_plugin.planner.costs.rates import RATES, Rates
from lightning_plugin.planner.recipes.recipe import Recipe
from lightning_plugin.planner.recipes.size import positions
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from lightning_plugin.planner.search.policies import policy_of
from lightning_plugin.settings import known_for
from tests.exactness import TOLERANCE, difference

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
#: What recipes are asked with: the rates and the tiers below a CPU.
BELOW = RATES["cpu"], lower_tiers(None, Options())
LAYERS: dict[str, Any] = {
    "conv": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "wide": lambda: nn.Conv2d(6, 6, 5, padding=2),
    "valid": lambda: nn.Conv2d(6, 6, 3),
    "down": lambda: nn.Conv2d(6, 6, 3, stride=2, padding=1),
    "pool": lambda: nn.MaxPool2d(3, 2, 1),
    "norm": lambda: nn.BatchNorm2d(6),
    "relu": lambda: nn.ReLU(True),
    "up": lambda: nn.Upsample(scale_factor=2),
}


def net(names: list[str], last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), *(LAYERS[n]() for n in names)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1) if last is None else last, nn.Flatten())


@contextmanager
def network(module: nn.Module, size: tuple[int, int]) -> Iterator[Network]:
    with recorded(module, (1, 3, *size), torch.float32) as (found, _):
        yield found


def recipe(module: nn.Module, size: tuple[int, int], share: float) -> Recipe:
    with network(module, size) as found:
        budget = found.fixed_bytes + int(share * found.plain_bytes)
        return choose_recipe(found, RATES["cpu"], max(budget, 1 << 20), lower_tiers(None, Options()))


sizes = st.tuples(st.integers(330, 600), st.integers(330, 600))


def sound(names: list[str]) -> bool:
    """Not too large, and no ReLU in place upon another, which PyTorch refuses."""
    return names.count("up") < 2 and ("relu", "relu") not in itertools.pairwise(names)


def compared(names: list[str], share: float, others: list[tuple[int, int]]) -> int:
    """How many of some sizes were looked up, each of which is rehearsed, too."""
    module, looked_up = net(names), 0
    found = recipe(module, (450, 440), share)
    for size in others:
        with network(module, size) as here:
            count = found.taught
            plan = found.at(here, *BELOW)
            looked_up += found.taught == count
            true = rehearse(plan, Network(here.recording))
            told = plan.peak_bytes - plan.forecast.reserve_bytes
            assert true.peak <= told <= 1.01 * true.peak + 1024, (names, size)
            for place, segment in enumerate(plan.segments):
                assert segment.forecast.backward_needs >= true.needs.get(place, 0)
    return looked_up


def compare(examples: int, fixed: int | None) -> int:
    """Formulas with rehearsals, at sizes drawn for networks drawn; how many sizes were looked up."""
    looked_up = 0

    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(
        st.lists(st.sampled_from(list(LAYERS)), min_size=2, max_size=5).filter(sound),
        st.floats(0.15, 0.7),
        st.lists(sizes, min_size=3, max_size=3),
    )
    def every(names: list[str], share: float, others: list[tuple[int, int]]) -> None:
        nonlocal looked_up
        looked_up += compared(names, share, others)

    (seed(fixed)(every) if fixed is not None else every)()
    return looked_up


@pytest.mark.parametrize("fixed", [0, None])
def test_a_formula_says_what_a_rehearsal_finds(fixed: int | None) -> None:
    compare(3, fixed)


def test_first_tiles_are_compared_with_first_ones() -> None:
    """Of one size only the first tile is as large as any, and finds less there than the second."""
    assert compared(["valid", "up", "norm", "norm"], 0.605, [(415, 342), (398, 331), (463, 513)])


@pytest.mark.full
def test_a_formula_says_what_a_rehearsal_finds_of_a_hundred_networks() -> None:
    assert compare(100, 1) >= 30


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_what_is_told_of_tiles_that_hand_rows_on_is_what_a_rehearsal_finds(share: float) -> None:
    """Of these each tensor is noted by itself, as large as it was at the sizes that were rehearsed."""
    module = net(["conv", "relu", "wide", "pool", "conv", "relu", "conv"])
    with network(module, (450, 440)) as first:
        budget = first.fixed_bytes + int(share * first.plain_bytes)
        lower = lower_tiers(None, Options())
        found = choose_recipe(first, RATES["cpu"], budget, lower, policy_of("auto", "share"))
    assert any(s.halo == "share" for s in found.plan.segments if not s.keep)
    for size in ((430, 420), (455, 441), (470, 446), (440, 436), (461, 450), (476, 420), (428, 452)):
        with network(module, size) as here:
            plan = found.at(here, *BELOW)
            assert plan is not None
            true = rehearse(plan, Network(here.recording))
            assert true.peak <= plan.peak_bytes - plan.forecast.reserve_bytes <= 1.01 * true.peak + 1024, size


def test_one_search_serves_all_smaller_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """And steps on them are exact and keep the budget, which a fixture looks after."""
    searches = []

    def counted(*args: Any, **kwargs: Any) -> Recipe:
        searches.append(args)
        return choose_recipe(*args, **kwargs)

    monkeypatch.setattr(lightning_plugin.settings, "choose_recipe", counted)
    module = net(["conv", "norm", "relu", "pool", "conv", "norm", "relu", "down", "conv"]).double()
    tiled = TiledModule(module, budget="3MiB", calls=1)
    grids = set()
    for size in ((260, 250), (251, 243), (232, 260), (257, 221), (230, 245)):
        image = torch.randn(1, 3, *size, dtype=torch.float64)
        module.zero_grad()
        plain = module(image)
        plain.square().sum().backward()
        expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        found = tiled(image)
        found.square().sum().backward()
        assert (found - plain).abs().max() < 1e-9 * plain.abs().max()
        for p, e in zip(module.parameters(), expected, strict=True):
            assert p.grad is not None
            assert (p.grad - e).abs().max() < 1e-9 * max(g.abs().max() for g in expected)
        assert tiled.plan is not None and tiled.plan.shape == image.shape
        grids |= {s.forward.sides for s in tiled.plan.segments}
    assert len(searches) == 1
    assert any(grids)


def test_what_is_foretold_of_a_larger_bag_is_in_proportion_to_its_patches() -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    with recorded(module, (60, 3, 32, 32), torch.float32) as (first, _):
        found = choose_recipe(first, RATES["cpu"], 1 << 20, lower_tiers(None, Options()))
    with recorded(module, (90, 3, 32, 32), torch.float32) as (larger, _):
        assert found.distance(larger.nodes) == 1.5
        plan = found.at(larger, *BELOW)
    assert plan.plain_bytes == pytest.approx(1.5 * found.plan.plain_bytes, rel=0.01)
    assert plan.seconds == pytest.approx(1.5 * found.plan.seconds)


class Rows(nn.Module):
    """The largest of each row: a vector that has the size of a side."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(3)


def test_where_a_vector_has_the_size_of_a_side_each_size_is_rehearsed() -> None:
    module = net(["conv", "relu"], Rows())
    found = recipe(module, (300, 310), 0.5)
    for place, size in enumerate(((290, 300), (280, 305), (270, 310)), 1):
        with network(module, size) as here:
            plan = found.at(here, *BELOW)
            assert found.taught == 1 + place
            assert plan.peak_bytes - plan.forecast.reserve_bytes == rehearse(plan, Network(here.recording)).peak


def test_a_formula_waits_for_sizes_that_differ_on_both_axes() -> None:
    module = net(["conv", "relu", "conv"])
    found = recipe(module, (300, 310), 0.3)
    for size, rehearsed in (((300, 305), 2), ((300, 306), 3), ((295, 304), 4), ((296, 303), 4)):
        with network(module, size) as here:
            found.at(here, *BELOW)
            assert found.taught == rehearsed, size


def test_tiles_have_the_sides_that_they_are_given() -> None:
    grid = Grid((3, 2), (40, 30))
    owned = [boxes for (boxes,) in grid.partition([(100, 59)])]
    assert owned[0] == Box((0, 0), (40, 30)) and owned[-1] == Box((80, 30), (100, 59))
    with pytest.raises(ValueError, match="sides"):
        Grid((3, 2), (40,))


def test_plans_that_keep_segments_have_a_formula() -> None:
    """What is kept has no tiles that could differ from size to size."""
    module = net(["conv", "norm", "relu", "pool", "conv"])
    with network(module, (238, 252)) as first:
        found = choose_recipe(first, RATES["cpu"], 1500 << 10, lower_tiers(None, Options()))
        assert {s.keep for s in found.plan.segments} == {True, False}
    for size in ((244, 262), (240, 258)):
        with network(module, size) as other:
            plan = found.at(other, *BELOW)
            assert plan is not None and {s.keep for s in plan.segments} == {True, False}
    assert found.taught == 2


def test_what_is_remembered_does_not_grow_with_the_number_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are shorter than tiles are on an axis have kinds of their own, as most small slides do."""
    monkeypatch.setattr(lightning_plugin.planner.recipes.recipe, "MOST_REHEARSALS", 3)
    monkeypatch.setattr(lightning_plugin.execute.rehearsal, "MOST_PASSES", 40)
    monkeypatch.setattr(lightning_plugin.execute.rehearsal, "MOST_TRACES", 10)
    monkeypatch.setattr(lightning_plugin.settings, "MOST_PLANS", 4)
    module = net(["conv", "norm", "relu", "pool", "conv"])
    tiled = TiledModule(module, budget="350KiB", calls=1)
    held = []
    for i in range(24):
        image = torch.randn(1, 3, 88 - 5 * (i % 12), 53 + 4 * (i % 12))
        found = tiled(image)
        found.sum().backward()
        assert (found - module(image)).abs().max() < 1e-4
        chosen = tiled.settings
        recipes = [recipe for recipes in chosen._recipes.values() for recipe in recipes]
        assert len(chosen._plans) <= 4
        for one in recipes:
            assert len(one.rehearsed) <= 3
        assert all(len(p.known) <= 40 and len(p.traces) <= 10 for p in chosen._passes.values())
        held.append(sum(one.taught for one in recipes))
    assert held[-1] > 12  # so many that some were let go of and found again


def test_a_recipe_that_was_too_large_is_not_asked_about_larger_images() -> None:
    module = net(["conv", "relu", "conv"])
    found = recipe(module, (300, 310), 0.3)
    asked: list[int] = []

    class Asked(Recipe):
        def at(self, network: Network, rates: Rates, lower: Lower, room: float = 0) -> Any:
            asked.append(positions(network.nodes))
            return super().at(network, rates, lower, room)

    counting = Asked(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.init})
    with network(module, (310, 312)) as here:
        assert known_for([counting], here, *BELOW, 1 << 16, 1) is None and len(asked) == 1
    with network(module, (311, 312)) as here:
        assert known_for([counting], here, *BELOW, 1 << 16, 1) is None and len(asked) == 1
    with network(module, (299, 308)) as here:
        assert known_for([counting], here, *BELOW, 1 << 30, 1) is not None and len(asked) == 2


@pytest.mark.parametrize("budget", ["400KiB", "700KiB"])
def test_what_shares_halos_stays_cut_along_one_axis(budget: str) -> None:
    """Also where an image is wider than the one that the recipe was made for."""
    module = net(["conv", "norm", "relu", "wide"]).double()
    plain = copy.deepcopy(module)
    tiled = TiledModule(module, budget=budget, halo="share")
    shared = 0
    for sides in ((58, 52), (62, 56), (61, 57), (57, 50), (56, 58)):
        x = torch.randn(1, 3, *sides, dtype=torch.float64)
        for run in (plain, tiled):
            run.zero_grad()
            run(x).square().sum().backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert difference(p.grad, q.grad, 1e-3) < TOLERANCE
        assert tiled.plan is not None and tiled.peak_bytes <= tiled.plan.peak_bytes
        scanned = [s for s in tiled.plan.segments if not s.keep and s.halo == "share"]
        assert all(sum(count > 1 for count in s.forward.counts) <= 1 for s in scanned)
        shared += len(scanned)
    assert shared > 3
