"""Patches, batches, windows and tokens are tiled, and give what plain PyTorch gives."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, seed, settings  # noqa: F401
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, make_plan, materialize
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.bags import CUTS, Bag, Drawn, draws

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
STEPS = 3


def trained(net: nn.Module, image: Callable[[], Tensor], steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of some steps of training, the gradients of the first, and what became of the module."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    outputs: list[Tensor] = []
    found: dict[str, Tensor] = {}
    for step in range(steps):
        out = net(image())
        outputs.append(materialize(out).detach().clone())
        optimizer.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        if not step:
            found |= {f"gradient of {n}": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
    return outputs, found | {n: t.detach().clone() for n, t in net.state_dict().items()}


class Tally:
    """What was run, and the largest error."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.largest = 0.0

    def check(self, drawn: Drawn) -> None:
        torch.manual_seed(drawn.seed)
        plain = Bag(drawn).double().train(drawn.train)
        tiled = copy.deepcopy(plain)
        x = torch.randn(drawn.shape, dtype=torch.float64)
        try:
            outputs, expected = trained(plain, lambda: x, STEPS)
        except (RuntimeError, ValueError):  # PyTorch refuses it: one value for each channel to normalise, say
            self.counts["refused by PyTorch"] += 1
            assume(False)
        if not all(o.isfinite().all() for o in outputs):
            assume(False)
        mine, found = trained(tiled, lambda: LazyImage.from_tensor(x, engine=drawn.plan), STEPS)
        floor = 1e-3 * max(float(t.abs().max()) for n, t in expected.items() if n.startswith("gradient"))
        errors = {f"output {i}": difference(a, b) for i, (a, b) in enumerate(zip(mine, outputs, strict=True))}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if value.is_floating_point():
                errors[name] = difference(found[name], value, floor if name.startswith("gradient") else 1e-3)
        wrong = {name: e for name, e in errors.items() if not e < TOLERANCE}
        assert not wrong, f"tiled and plain differ: {wrong}"
        self.counts["networks"] += 1
        self.counts[drawn.cut.__name__] += 1
        self.counts["of several images"] += drawn.batch > 1
        self.counts["with a barrier"] += bool(drawn.plan.noted)
        self.counts["with keys in pieces"] += bool(drawn.plan.streams)
        self.counts.update(f"attention {form}" for form in {*drawn.forms, drawn.over} - {""})
        self.largest = max(self.largest, *errors.values())

    def result(self) -> dict[str, Any]:
        return {**self.counts, "largest error": self.largest}


def run(tally: Tally, examples: int, fixed: int | None) -> None:
    @settings(max_examples=examples, derandomize=False, phases=[Phase.generate, Phase.shrink], **QUIET)
    @given(draws())
    def every(drawn: Drawn) -> None:
        tally.check(drawn)

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.slow
def test_sampled_networks_are_exact() -> None:
    tally = Tally()
    run(tally, 5, 1)
    assert tally.counts["networks"] >= 3


def test_fresh_networks_are_exact() -> None:
    run(Tally(), 3, None)


@pytest.mark.full
def test_five_hundred_networks_are_exact(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    tally = Tally()
    for part in range(6):
        run(tally, 110, 100 + part)
    assert tally.counts["networks"] >= 500
    record_result("exactness_axes", tally.result())


class Encoded(nn.Module):
    """Patches of an image, one encoder, and their mean: nothing in it but what is tiled along patches."""

    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.cut = cut
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.cut(x, 16)).mean(0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", [c for c in CUTS if c.__name__ != "whole"], ids=lambda c: c.__name__)
def test_no_spelling_is_a_barrier(cut: Any) -> None:
    plan = make_plan(Encoded(cut), (1, 3, 192, 160), budget="4MiB")
    assert not plan.barriers
    assert plan.peak_bytes < 4 * 2**20


def test_a_batch_is_cut_where_space_need_not_be() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    plan = make_plan(net, (64, 3, 40, 40), budget="4MiB")
    grids = [grid.counts for s in plan.segments for grid in (s.forward, s.backward) if not s.keep]
    assert any(counts[2] > 1 for counts in grids), grids
    assert any(counts[:2] == (1, 1) and counts[2] > 1 for counts in grids), grids


class Cumulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).cumsum(2).cumsum(3) / 1000
        return (y * torch.linspace(-1, 2, y.shape[-1], dtype=y.dtype)).square().mean() + 0.3 * y.mean()


def test_a_bias_below_cumulated_sums_in_float32() -> None:
    """Smooth cotangents of one sign, summed in a row, lose two digits."""
    for number in range(6):
        torch.manual_seed(number)
        net, x = Cumulated(), torch.randn(2, 3, 32, 40)

        def gradients(how: Any, dtype: torch.dtype, net: nn.Module = net, x: Tensor = x) -> Tensor:
            own = copy.deepcopy(net).to(dtype)
            how(own)(x.to(dtype)).backward()
            return torch.cat([p.grad.double().flatten() for p in own.parameters()])

        exact = gradients(lambda own: own, torch.float64)
        plain = (gradients(lambda own: own, torch.float32) - exact).norm()
        tiled = (gradients(lambda own: TiledModule(own, tiles=(2, 2)), torch.float32) - exact).norm()
        assert tiled <= 2 * plain
