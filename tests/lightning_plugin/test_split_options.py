"""What a user says about splits, what is refused, and where it is said that a training was an approximation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import Plan, PlanError, TiledModule, make_plan
from lightning_plugin.boxes import Box, Window
from lightning_plugin.rules.convolution import Convolution
from lightning_plugin.split import Seam, Split, Splitting
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.split_by_hand import Residual, split_step

HALF: dict[str, Any] = {"halo": "split", "splits": 2}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), Residual(body, nn.Conv2d(8, 8, 1, 2)), nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    ).double()  # fmt: skip


def image(side: int = 96) -> Tensor:
    return torch.randn(1, 3, side, side, dtype=torch.float64)


def even(axis: int, size: int) -> list[int]:
    return [size // 2]


@pytest.mark.parametrize("budget", ["500KiB", "900KiB", "1GiB"])
def test_a_budget_is_kept_and_does_not_change_the_function(budget: str) -> None:
    plain = net()
    other = copy.deepcopy(plain)
    tiled = TiledModule(other, budget=budget, split_depth="2", **HALF)
    x = image()
    expected, actual = split_step(plain, 3, x, even), tiled(x)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert tiled.plan is not None and tiled.plan.budget is not None
    assert tiled.peak_bytes <= tiled.plan.budget
    assert difference(actual, expected) < TOLERANCE
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        assert difference(q.grad, p.grad) < TOLERANCE  # type: ignore[arg-type]


def test_evaluation_is_not_split() -> None:
    plain = net()
    tiled = TiledModule(plain, tiles=3, split_depth=1.0, **HALF)
    x = image()
    assert difference(tiled(x), plain(x)) > 1e-6
    plain.eval()
    assert difference(tiled(x), plain(x)) < TOLERANCE
    assert tiled.plan is not None and not tiled.plan.approximation


def test_a_frozen_trunk_is_not_split() -> None:
    plain = net()
    plain[0].eval(), plain[2].eval()
    tiled = TiledModule(plain, tiles=1, split_depth=1.0, **HALF)
    tiled(image())
    assert tiled.plan is not None and "1 window operators" in tiled.plan.approximation


def test_a_tile_within_a_split_reads_nothing_beyond_it() -> None:
    inner = Convolution((Window(5, 1, 1, 2),), (0,), (40,))
    split = Split(inner, (Seam(-1, (0, 20, 40), (0, 20, 40)),), Splitting((2,), 1.0))
    assert split.need(Box((0,), (20,))) == (Box((0,), (20,)),)
    assert split.need(Box((24,), (40,))) == (Box((22,), (40,)),)
    assert inner.need(Box((0,), (20,))) == (Box((0,), (22,)),)
    assert split.mark(0, 20, 40) != split.mark(0, 10, 30)


def test_a_share_of_the_windows_and_a_path_say_a_depth() -> None:
    for depth, count in ((0.2, 1), (0.6, 3), (1.0, 5), ("0", 1), ("2.body", 3), ("2", 4)):
        tiled = TiledModule(net(), tiles=1, split_depth=depth, **HALF)
        tiled(image())
        assert tiled.plan is not None
        assert f": {count} window operators" in tiled.plan.approximation, depth


def test_stochastic_splits_are_drawn_anew_and_repeat_with_the_seed() -> None:
    tiled = TiledModule(net(), tiles=1, halo="stochastic_split", splits=2, split_depth=1.0)
    x = image()

    def several(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [tiled(x).detach() for _ in range(4)]

    first, again = several(1), several(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(a.flatten().tolist()) for a in first}) > 1


def test_cuts_keep_to_the_bounds_of_the_paper() -> None:
    how = Splitting((4,), 1.0, 0.2)
    drawn = [how.cuts(0, 80, key)[1:-1] for key in range(300)]
    for i, cuts in enumerate(zip(*drawn, strict=True), 1):
        assert set(cuts) == set(range(20 * i - 4, 20 * i + 5))
    assert Splitting((3,), 1.0).cuts(0, 10, 0) == (0, 3, 6, 10)
    assert Splitting((3,), 1.0, 0.2).cuts(0, 8, 5) == (0, 3, 5, 8)  # the bounds hold one number for each
    assert Splitting((3,), 1.0, 0.0).cuts(0, 8, 5) == (0, 2, 5, 8)  # and here none


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"halo": "split"}, "splits are given with halo"),
        ({"splits": 2}, "splits are given with halo"),
        ({"halo": "split", "splits": 1}, "two splits or more"),
        ({"halo": "split", "splits": 2, "split_depth": 0.0}, "more than 0 and at most 1"),
        ({"halo": "stochastic_split", "splits": 2, "wobble": 0.5}, "0 <= wobble < 0.5"),
    ],
)
def test_what_is_wrong_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TiledModule(net(), tiles=1, **words)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(2)


class Attended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        out: Tensor = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return out.transpose(1, 2).view_as(x)


def test_attention_between_splits_is_over_the_whole_map() -> None:
    """It has no windows to be split; the convolutions on both sides of it have."""
    odd = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Attended(), nn.Conv2d(4, 4, 3, padding=1)).double()
    x = image(16)

    def split(convolution: nn.Module, x: Tensor) -> Tensor:
        rows = [[convolution(part.contiguous()) for part in row.split(8, 3)] for row in x.split(8, 2)]
        return torch.cat([torch.cat(row, 3) for row in rows], 2)

    expected = split(odd[2], odd[1](split(odd[0], x)))
    for tiles in (1, (3, 2)):
        found = TiledModule(odd, tiles=tiles, split_depth=1.0, **HALF)(x)
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("between", [Turned(), nn.Upsample(scale_factor=2)])
def test_what_cannot_be_split_is_refused_by_name(between: nn.Module) -> None:
    odd = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), between, nn.Conv2d(4, 4, 3, padding=1)).double()
    with pytest.raises(PlanError, match="Give a smaller split_depth"):
        TiledModule(odd, tiles=1, split_depth=1.0, **HALF)(image(16))
    TiledModule(odd, tiles=1, split_depth="0", **HALF)(image(16))


def test_a_depth_that_no_module_has_and_too_many_splits_are_named() -> None:
    with pytest.raises(PlanError, match="split_depth='head' is the path of no module"):
        TiledModule(net(), tiles=1, split_depth="head", **HALF)(image())
    with pytest.raises(PlanError, match="cannot be cut into 9 splits"):
        TiledModule(net(), tiles=1, halo="split", splits=9, split_depth=1.0)(image(12))


@pytest.mark.slow
def test_a_plan_says_that_it_is_an_approximation(tmp_path: Path) -> None:
    plan = make_plan(net(), (1, 3, 96, 96), budget="900KiB", dtype=torch.float64, split_depth="2", **HALF)
    assert plan.approximation.startswith("splits 2 along each axis up to '2'")
    assert "an approximation in training: splits 2" in str(plan)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.approximation == plan.approximation
    plan.draw(str(tmp_path / "plan.png"))
    assert not make_plan(net(), (1, 3, 96, 96), budget="900KiB", dtype=torch.float64).approximation
    with pytest.raises(PlanError, match="this one is exact"):
        TiledModule(net(), plan=plan)(image())


def test_rows_that_are_shared_and_splits_are_two_choices() -> None:
    plan = make_plan(net(), (1, 3, 96, 96), budget="400KiB", dtype=torch.float64, split_depth=1.0, **HALF)
    assert not any(s.halo == "share" for s in plan.segments)
