"""Split networks against the same done by hand in plain PyTorch: the function is that of the splits, on any tiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import PlanError, TiledModule
from lightning_plugin.split import Splitting
from tests.exactness import TOLERANCE, compare
from tests.lightning_plugin.split_by_hand import Impossible, Residual, Windows, split_step

QUIET: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def layers(draw: st.DrawFn, channels: int) -> tuple[nn.Module, int]:
    """A module that reads so many channels, and how many it makes."""
    kind = draw(st.sampled_from(["conv", "conv", "max", "average", "norm", "relu", "residual", "residual"]))
    stride = draw(st.integers(1, 2))
    if kind == "conv":
        kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 2))
        padding = draw(st.integers(0, dilation * (kernel - 1)))
        return nn.Conv2d(channels, 4, kernel, (stride, draw(st.integers(1, 3))), padding, dilation), 4
    if kind == "max":
        kernel = draw(st.integers(2, 3))
        ceil = draw(st.booleans())
        return nn.MaxPool2d(kernel, draw(st.integers(1, 3)), draw(st.integers(0, 1)), ceil_mode=ceil), channels
    if kind == "average":
        kernel = draw(st.integers(2, 3))
        pool = nn.AvgPool2d(kernel, stride, draw(st.integers(0, 1)), count_include_pad=draw(st.booleans()))
        return pool, channels
    if kind == "norm":
        return nn.BatchNorm2d(channels), channels
    if kind == "relu":
        return nn.ReLU(), channels
    body = nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1)
    )
    plain = stride == 1 and channels == 4
    return Residual(body, nn.Identity() if plain else nn.Conv2d(channels, 4, 1, stride)), 4


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, int]:
    """A network, and how many of its modules are to be split: the last of these has a window."""
    made, channels = [], 3
    for _ in range(draw(st.integers(2, 5))):
        layer, channels = draw(layers(channels))
        made.append(layer)
    ends = [i + 1 for i, layer in enumerate(made) if isinstance(layer, (*Windows, Residual))]
    assume(ends)
    net = nn.Sequential(*made).double()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.bias, 0.5, 1.5)  # of a mean that is zero but for rounding no digit can be compared
    return net, draw(st.sampled_from(ends))


sides = st.tuples(st.integers(11, 40), st.integers(11, 40))
grids = st.tuples(st.integers(1, 4), st.integers(1, 4))


def even(splits: tuple[int, int]) -> Any:
    return lambda axis, size: [i * size // splits[axis] for i in range(1, splits[axis])]


def steps(net: nn.Module, tiled: nn.Module, x: Tensor, by_hand: Any) -> dict[str, float]:
    """The errors of a step of a tiled module against a function of a tensor by hand."""
    twin = x.detach().clone().requires_grad_()
    expected = by_hand(x)
    actual = tiled(twin)
    weights = torch.randn_like(expected)
    losses = (expected * weights).sum(), (actual * weights).sum()
    for loss in losses:
        loss.backward()
    inner = tiled.module if isinstance(tiled, TiledModule) else tiled
    return {
        "loss": (losses[0] - losses[1]).abs().item() / max(1.0, losses[0].abs().item()),
        **compare(net, inner, [actual], [expected], (twin.grad, x.grad)),
    }


def attempt(
    case: tuple[nn.Sequential, int], side: tuple[int, int], splits: tuple[int, int], cuts_of: Any, **options: Any
) -> None:
    """One comparison; where the splits are impossible, the engine has to say so."""
    net, until = case
    x = torch.randn(2, 3, *side, dtype=torch.float64, requires_grad=True)
    try:
        if not copy.deepcopy(net)(x).isfinite().all():
            assume(False)
    except (RuntimeError, ValueError):  # too small for PyTorch itself
        assume(False)
    other = copy.deepcopy(net)
    tiled = TiledModule(other, splits=splits, split_depth=str(until - 1), **options)
    try:
        found = steps(net, tiled, x, lambda x: split_step(net, until, x, cuts_of))
    except Impossible:
        with pytest.raises(PlanError, match=r"Give a smaller split_depth|give fewer splits"):
            tiled(x)
        return
    wrong = {name: e for name, e in found.items() if not e < TOLERANCE}
    assert not wrong, f"split by hand and by the engine differ: {wrong}"


@seed(1)
@settings(max_examples=8, **QUIET)
@given(networks(), sides, st.tuples(st.integers(1, 3), st.integers(2, 3)), grids, grids)
def test_a_split_network_is_the_one_by_hand(case: Any, side: Any, splits: Any, forward: Any, backward: Any) -> None:
    attempt(case, side, splits, even(splits), halo="split", tiles=forward, backward_tiles=backward)


@seed(2)
@settings(max_examples=5, **QUIET)
@given(networks(), sides, st.tuples(st.integers(1, 3), st.integers(2, 3)), grids, st.floats(0, 0.49))
def test_a_stochastically_split_network_is_the_one_by_hand(
    case: Any, side: Any, splits: Any, grid: Any, wobble: float
) -> None:
    """By hand it is cut where the step has drawn it."""
    known: dict[tuple[int, int], list[int]] = {}
    drawn = Splitting.cuts

    def cuts_of(axis: int, size: int) -> list[int]:
        if (axis, size) not in known:
            how = Splitting(splits, 1.0, wobble)
            known[axis, size] = list(drawn(how, axis, size, 11))[1:-1]
        return known[axis, size]

    with pytest.MonkeyPatch.context() as patched:

        def fixed(self: Splitting, axis: int, size: int, key: int) -> tuple[int, ...]:
            return (0, *cuts_of(axis, size), size)

        patched.setattr(Splitting, "cuts", fixed)
        attempt(
            case, side, splits, cuts_of,
            halo="stochastic_split", wobble=wobble, tiles=grid,
        )  # fmt: skip
