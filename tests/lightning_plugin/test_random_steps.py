"""Random training steps: with the engine they do what plain PyTorch does (`step_judge` says what that means).

Calls of several modules on several images, losses pulled back in any order, in-place writes, what is dropped, frozen,
changed or fails in between. A failing step prints as Python that a person can read and run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from tests.lightning_plugin.step_draws import steps
from tests.lightning_plugin.step_judge import faults, judge
from tests.lightning_plugin.steps import Ask, Backward, Call, Drop, Image, Network, Step, Way

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
FEW = ("float32", "bfloat16", "autocast")


class Tally:
    """What became of the steps, and the worst ratio to the bound of each kind of number."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.worst: dict[str, float] = {}

    def check(self, step: Step) -> None:
        verdict = judge(step)
        note(f"faults({step!r})")
        assert not verdict.faults, verdict.faults
        self.kinds[verdict.kind] += 1
        if verdict.kind == "compared":
            self.worst[step.dtype] = max(self.worst.get(step.dtype, 0.0), verdict.ratio)

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def made(self) -> int:
        """The steps that plain PyTorch makes: a sample may by chance have many that it refuses."""
        return self.total - self.kinds["refused by both"] - self.kinds["right where PyTorch refuses"]

    def result(self) -> dict[str, Any]:
        return {"steps": self.total, **self.kinds, "largest error over the bound's unit": self.worst}


def run(tally: Tally, examples: int, fixed: int | None, dtypes: Sequence[str], asking: bool = False) -> None:
    @settings(max_examples=examples, derandomize=False, phases=[Phase.generate, Phase.shrink], **QUIET)
    @given(steps(dtypes, asking))
    def every(step: Step) -> None:
        tally.check(step)

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
def test_sampled_steps_are_exact_in_float64(part: int) -> None:
    tally = Tally()
    run(tally, 12, part, ("float64",))
    assert tally.made and tally.kinds["compared"] >= 0.5 * tally.made, tally.kinds


@pytest.mark.parametrize("dtype", FEW)
def test_sampled_steps_round_no_more_than_plain(dtype: str) -> None:
    tally = Tally()
    run(tally, 5, 50, (dtype,))
    assert tally.made and tally.kinds["compared"] >= 0.5 * tally.made, tally.kinds


def test_fresh_steps_are_exact() -> None:
    """Other steps in every run."""
    run(Tally(), 8, None, ("float64", *FEW))


def test_sampled_steps_with_values_asked_for_in_networks() -> None:
    tally = Tally()
    run(tally, 8, 310, ("float64",), asking=True)
    assert tally.made and tally.kinds["compared"] >= 0.5 * tally.made, tally.kinds


@pytest.mark.full
def test_five_hundred_steps_with_values_asked_for_in_networks(
    record_result: Callable[[str, dict[str, Any]], None],
) -> None:
    tally = Tally()
    for part in range(5):
        run(tally, 100, 400 + part, ("float64",), asking=True)
    assert tally.total >= 500
    record_result("exactness_asked_values", tally.result())


@pytest.mark.full
def test_two_thousand_steps_are_exact_in_float64(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    tally = Tally()
    for part in range(10):
        run(tally, 200, 100 + part, ("float64",))
    assert tally.total >= 2000
    assert tally.kinds["badly conditioned"] <= 0.02 * tally.total, tally.kinds
    record_result("exactness_steps", tally.result())


@pytest.mark.full
def test_five_hundred_steps_round_no_more_than_plain(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    tally = Tally()
    run(tally, 500, 200, FEW)
    assert tally.total >= 500
    assert tally.kinds["decided by a tie"] <= 0.1 * tally.total, tally.kinds
    assert tally.kinds["rounded as at another size"] <= 0.1 * tally.total, tally.kinds
    record_result("exactness_steps_few_digits", tally.result())


# What the draws found, kept ------------------------------------------------------------------------------------------

CONV = Network(("conv3",), ("mean",))

FOUND: dict[str, Step] = {
    "two losses of two networks": Step(
        "float64",
        (Image((20, 21), "noise"),),
        (CONV, CONV),
        (Call(0, 0), Call(1, 0), Backward(((0, 0),)), Backward(((1, 0),))),
        Way("lazy"),
    ),
    "a tied maximum, other grid backward": Step(
        "float32",
        (Image((33, 40), "repeated"),),
        (Network(("conv3", "relu", "conv5", "relu", "conv3"), ("amax",)),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 1), (3, 5)),
        width=6,
    ),
    "a gradient that is zero but for rounding": Step(
        "float64",
        (Image((12, 12), "noise", kind="leaf"),),
        (Network(("conv1", "conv1", "batch"), ("mean",)), Network(("conv1",), ("mean",))),
        (Call(0, 0, "frozen"), Call(1, 0), Drop(1), Backward(((0, 0),))),
        Way("tiled"),
    ),
    "frozen for one of two calls": Step(
        "float64",
        (Image((20, 21), "noise"),),
        (CONV,),
        (Call(0, 0, "frozen"), Call(0, 0), Backward(((0, 0), (1, 0)))),
        Way("lazy"),
    ),
    "an adaptive maximum under a budget": Step(
        "float64",
        (Image((33, 40), "noise"),),
        (Network(("valid3",), ("adaptive max", "max", "max and where")),),
        (Call(0, 0), Backward(((0, 0), (0, 1)))),
        Way("tiled", budget=40 * 1024),
    ),
    "a mean's gradient, one number everywhere, in a segment that is kept": Step(
        "float32",
        (Image((12, 12), "noise"),),
        (CONV,),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", budget=20 * 1024),
    ),
    "a mean's gradient, one number everywhere, in a segment of tiles": Step(
        "float32",
        (Image((12, 12), "noise"),),
        (CONV,),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 1)),
        width=4,
    ),
    "a mean of what was normalised, whose gradients cancel": Step(
        "float32",
        (Image((12, 12), "noise"),),
        (Network(("conv3", "valid3", "valid3", "batch"), ("mean",)),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 2)),
        width=4,
    ),
    "a ReLU in place upon a ReLU in place": Step(
        "float32",
        (Image((12, 12), "noise"),),
        (Network(("conv1", "instance", "relu_", "relu_"), ("mean",)),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 1)),
        width=4,
    ),
    "a hook on a result beside a map that is stored": Step(
        "float32",
        (Image((12, 12), "whole"),),
        (CONV, Network(("conv1",), ("amax", "max of rows"), small="v.register_hook(double)")),
        (Call(0, 0), Call(1, 0), Backward(((0, 0), (1, 0)), retain=True), Backward(((1, 1),))),
        Way("tiled", (1, 1)),
        width=4,
        whole=True,
    ),
    "a hook on a result for each of two images": Step(
        "float32",
        (Image((12, 12), "noise", batch=2),),
        (Network(("conv1",), ("max of rows",), small="v.register_hook(double)"),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 1), budget=20 * 1024),
        width=4,
    ),
    "a norm in bfloat16 in a segment that is kept": Step(
        "bfloat16",
        (Image((12, 12), "noise"),),
        (Network(("conv1", "batch"), ("mean",)),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", (1, 1), budget=20 * 1024),
        width=4,
    ),
    "a norm's gradients in a segment that is kept": Step(
        "float32",
        (Image((22, 76), "noise"),),
        (Network(("valid3", "conv3", "instance", "prelu"), ("mean",)),),
        (Call(0, 0), Backward(((0, 0),))),
        Way("tiled", budget=120 * 1024),
    ),
    "eval mode after a call in train mode that has not run": Step(
        "float64",
        (Image((16, 16), "noise"),),
        (Network(("valid3", "batch"), ("mean",)),),
        (Call(0, 0), Call(0, 0, "eval"), Backward(((1, 0),))),
        Way("lazy"),
    ),
    "a hook on each of two results": Step(
        "float64",
        (Image((12, 12), "noise"),),
        (Network(("conv1",), ("mean", "amax"), small="v.register_hook(double)"),),
        (Call(0, 0), Backward(((0, 0),), retain=True), Backward(((0, 1),))),
    ),
    "a retained graph of two calls under a budget": Step(
        "float64",
        (Image((26, 39), "repeated", batch=2),),
        (Network(("conv5", "conv3", "relu"), ("max pool",)), Network(("conv3", "gelu", "conv1"), ("mean", "amax"))),
        (Call(0, 0), Ask(0), Call(1, 0), Backward(((0, 0), (1, 1)), retain=True, product=True)),
        Way("lazy", budget=525312),
    ),
    "without grad, two results, a small budget": Step(
        "float64",
        (Image((44, 64), "noise"),),
        (Network(("conv1",), ("amax of rows", "max pool")),),
        (Call(0, 0, "no_grad"), Ask(0)),
        Way("lazy", budget=60 * 1024),
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_steps_that_failed_once(name: str) -> None:
    assert not faults(FOUND[name])


# The judge can say no ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_judge_sees_a_gradient_that_is_lost(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is right but for one small gradient is found out, in every type."""
    from tests.lightning_plugin import step_judge

    step = Step(dtype, (Image((20, 21), "repeated"),), (Network(("conv3",), ("amax",)),), (
        Call(0, 0), Backward(((0, 0),)),
    ))  # fmt: skip
    right = step_judge.run_tiled

    def wrong(step: Step) -> Any:
        found = right(step)
        gradient = found.gradients["0.layers.0.bias"]
        assert gradient is not None
        gradient[0] = 0
        return found

    assert not faults(step)
    monkeypatch.setattr(step_judge, "run_tiled", wrong)
    assert faults(step)
