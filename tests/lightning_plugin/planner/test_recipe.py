"""A plan found for one size serves others: it is exact there, keeps the budget, and is not searched for again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lightning_plugin.plans
from lightning_plugin import TiledModule
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.options import Options
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import choose_recipe
from lightning_plugin.planner.costs.lower import LowerTiers, lower_tiers
from lightning_plugin.planner.costs.rates import RATES
from lightning_plugin.planner.recipe import Recipe, positions
from lightning_plugin.planner.rehearsal.rehearse import rehearse
from lightning_plugin.planner.search.policies import AUTO, with_halo
from lightning_plugin.plans import apply_recipes
from tests.exactness import TOLERANCE, difference

BELOW = lower_tiers(None, Options())
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


@pytest.mark.slow
def test_one_search_serves_all_smaller_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """And steps on them are exact and keep the budget, which a fixture looks after."""
    searches = []

    def counted(*args: Any, **kwargs: Any) -> Recipe:
        searches.append(args)
        return choose_recipe(*args, **kwargs)

    monkeypatch.setattr(lightning_plugin.plans, "choose_recipe", counted)
    module = net(["conv", "norm", "relu", "pool", "conv", "norm", "relu", "down", "conv"]).double()
    tiled = TiledModule(module, budget="3MiB", calls=1)
    grids = set()
    for size in ((260, 250), (251, 243), (257, 221)):
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


def test_tiles_are_made_smaller_where_another_size_leaves_less_room() -> None:
    """Before a search is made for it: what the plan holds is what is rehearsed, within the room."""
    module = net(["conv", "norm", "relu", "pool", "conv", "norm", "relu", "down", "conv"])
    found = recipe(module, (300, 310), 0.2)
    with network(module, (290, 312)) as here:
        free = found.at(here, BELOW)
        assert free is not None
        room = free.peak_bytes - 1
        plan = found.at(here, BELOW, room)
        assert plan is not None and plan.peak_bytes <= room
        assert plan.peak_bytes - plan.forecast.reserve_bytes == rehearse(plan, Network(here.recording)).peak
        assert [s.targets for s in plan.segments] == [s.targets for s in found.plan.segments]
        assert found.at(here, BELOW, 1000) is None


def test_what_is_foretold_of_a_larger_bag_is_in_proportion_to_its_patches() -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    with recorded(module, (60, 3, 32, 32), torch.float32) as (first, _):
        found = choose_recipe(first, RATES["cpu"], 1 << 20, lower_tiers(None, Options()))
    with recorded(module, (90, 3, 32, 32), torch.float32) as (larger, _):
        assert found.distance(larger.nodes) == 1.5
        plan = found.at(larger, BELOW)
    assert plan.plain_bytes == pytest.approx(1.5 * found.plan.plain_bytes, rel=0.01)
    assert plan.seconds == pytest.approx(1.5 * found.plan.seconds)


def test_tiles_have_the_sides_that_they_are_given() -> None:
    grid = Grid((3, 2), (40, 30))
    owned = [boxes for (boxes,) in grid.partition([(100, 59)])]
    assert owned[0] == Box((0, 0), (40, 30)) and owned[-1] == Box((80, 30), (100, 59))
    with pytest.raises(ValueError, match="sides"):
        Grid((3, 2), (40,))


def test_a_recipe_that_was_too_large_is_not_asked_about_larger_images() -> None:
    module = net(["conv", "relu", "conv"])
    found = recipe(module, (300, 310), 0.3)
    asked: list[int] = []

    class Asked(Recipe):
        def at(self, network: Network, lower: LowerTiers, room: float = 0) -> Any:
            asked.append(positions(network.nodes))
            return super().at(network, lower, room)

    counting = Asked(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.init})
    with network(module, (310, 312)) as here:
        assert apply_recipes([counting], here, BELOW, 1 << 16, 1) is None and len(asked) == 1
    with network(module, (311, 312)) as here:
        assert apply_recipes([counting], here, BELOW, 1 << 16, 1) is None and len(asked) == 1
    with network(module, (299, 308)) as here:
        assert apply_recipes([counting], here, BELOW, 1 << 30, 1) is not None and len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param("400KiB", marks=pytest.mark.full), "700KiB"])
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


def test_rows_that_are_handed_on_are_made_shorter_where_another_size_leaves_less_room() -> None:
    """In both directions alike, as what forward hands on backward takes."""
    module = net(["conv", "norm", "relu", "wide"])
    with network(module, (58, 52)) as here:
        found = choose_recipe(here, RATES["cpu"], 300 << 10, BELOW, with_halo(AUTO, "share"))
    with network(module, (62, 56)) as here:
        free = found.at(here, BELOW)
        assert free is not None
        plan = found.at(here, BELOW, free.peak_bytes - 1)
    assert plan is not None and plan.peak_bytes < free.peak_bytes
    shorter = [(s, was) for s, was in zip(plan.segments, free.segments, strict=True) if s.halo == "share" and s != was]
    assert any(s.forward.sides < was.forward.sides for s, was in shorter)
    assert all(s.forward == s.backward for s, _ in shorter)


def test_one_search_serves_sizes_also_where_parameters_move_to_a_lower_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is found for tensors on the device; the steps after it find some of them below."""
    searches: list[int] = []

    def counting(network: Network, *rest: Any) -> Recipe:
        searches.append(len(network.below))
        return choose_recipe(network, *rest)

    monkeypatch.setattr(lightning_plugin.plans, "choose_recipe", counting)
    wide = [nn.Flatten(), nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 256), nn.Linear(256, 2)]
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), *wide).double()
    plain, tiled = copy.deepcopy(net), TiledModule(net, budget="10MiB")
    for side in (96, 92, 100, 94):
        x = torch.randn(1, 3, side, 96, dtype=torch.float64)
        for module, network in ((plain, plain), (tiled, net)):
            network.zero_grad()
            module(x).square().sum().backward()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert searches == [0]
    assert any(plan.on_host or plan.on_disk for kept in tiled.engine.planner.plans.values() for plan in kept)
