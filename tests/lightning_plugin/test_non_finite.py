"""A step whose loss is not finite says what was the first not to be: the module that plain PyTorch's hooks find."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, make_plan
from lightning_plugin.execute import finite
from tests.exactness import difference
from tests.zoo import ZOO, fill

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
NETWORKS = sorted(name for name, entry in ZOO.items() if not entry.stochastic and len(entry.shape) == 4)
WAYS: list[dict[str, Any]] = [
    {"tiles": (3, 2)}, {"tiles": (3, 1), "halo": "share"}, {"budget": "1GiB"}, {"budget": "least"},
]  # fmt: skip


class Spoilt(nn.Module):
    """A logarithm of what is mostly positive."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - self.level)


def leaves(net: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in net.named_modules() if not list(module.children())}


def watched(net: nn.Module, x: Tensor, look: Any) -> Any:
    """Plain PyTorch's result; ``look`` sees what each module without parts makes of what."""
    handles = [
        module.register_forward_hook(lambda m, given, made, name=name: look(name, given, made))
        for name, module in leaves(net).items()
    ]
    try:
        return net(x)
    finally:
        for handle in handles:
            handle.remove()


def spoil(net: nn.Module, x: Tensor, name: str) -> None:
    """Have a module hand on the logarithm of its result less a level between two of its least values."""
    least: list[float] = []

    def look(here: str, given: Any, made: Any) -> None:
        if here == name:
            values, below = made.detach().flatten().double().sort().values, max(1, made.numel() // 500)
            assume(len(values) > below and values[below] - values[below - 1] > 1e-9)  # tiles round otherwise
            least.append(float(values[below - 1 : below + 1].mean()))

    watched(net, x, look)
    assume(least)
    parent, _, last = name.rpartition(".")
    owner = net.get_submodule(parent)
    setattr(owner, last, nn.Sequential(getattr(owner, last), Spoilt(least[0])))


def first_by_hooks(net: nn.Module, x: Tensor) -> tuple[str | None, Any]:
    """The first module whose result is not finite though what it was given is."""
    found: list[str] = []

    def look(name: str, given: Any, made: Any) -> None:
        fine = all(t.isfinite().all() for t in given if isinstance(t, Tensor))
        if fine and isinstance(made, Tensor) and not made.isfinite().all():
            found.append(name)

    out = watched(net, x, look)
    return (found[0] if found else None), out


def every(data: st.DataObject) -> None:
    entry = ZOO[data.draw(st.sampled_from(NETWORKS))]
    way = dict(data.draw(st.sampled_from(WAYS)))
    net = fill(entry.build().double()).train()
    x = torch.linspace(-1, 1, torch.Size(entry.shape).numel(), dtype=torch.float64).sin().reshape(entry.shape)
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    name = data.draw(st.sampled_from([n for n, m in leaves(net).items() if isinstance(m, kinds)]))
    try:
        spoil(net, x, name)
        right, out = first_by_hooks(net, x)
    except (AttributeError, TypeError):
        assume(False)  # a network that looks into its modules
    assume(right is not None and isinstance(out, Tensor) and not out.isfinite().all())
    if way.get("budget") == "least":
        with pytest.raises(Exception, match=r"smallest|at least") as refused:
            make_plan(net, LazyImage(x), budget=1)
        way["budget"] = int(1.5 * refused.value.smallest)  # type: ignore[attr-defined]
    tiled = TiledModule(net, **way)
    loss = tiled(LazyImage(x)).square().mean()
    value = float(loss.detach())
    assert value != value or abs(value) == float("inf")
    assert tiled.non_finite is not None
    assert f"in '{right}'" in str(tiled.non_finite), f"{tiled.non_finite}; plain PyTorch: {right}"
    loss.backward()  # the step goes on


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [1, None])
def test_the_first_operator_is_that_of_plain_pytorch(fixed: int | None) -> None:
    run = settings(max_examples=3, phases=[Phase.generate], **QUIET)(given(st.data())(every))
    (seed(fixed)(run) if fixed is not None else run)()


class Small(nn.Module):
    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x)).relu()
        if self.bad == "infinite":
            x = torch.exp(1000 * x)
        x = self.two(x).mean((2, 3))
        if self.bad == "vector":
            x = x / (x - x)
        return self.head(x)


@pytest.mark.parametrize("way", [{"tiles": (2, 3)}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("infinite", r"first NaN is in the result of convolution in 'two'.*; before it, the first infinite.*of exp"),
        ("vector", "infinite value is in the result of div"),
        ("image", r"first NaN is in an image"),
        ("weight", r"a tensor of shape \(4, 4, 3, 3\) that convolution in 'two' uses: it was not finite before"),
    ],
)
def test_what_was_first_is_said_once(
    bad: str, said: str, way: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = Small(bad)
    x = torch.randn(1, 3, 24, 36)
    if bad == "image":
        x[0, 0, 3, 4] = float("nan")
    if bad == "weight":
        net.two.weight.data[0, 0, 0, 0] = float("nan")
    tiled = TiledModule(net, **way)
    with caplog.at_level(logging.WARNING, "lightning_plugin"):
        for _ in range(2):
            tiled(LazyImage(x)).sum().backward()
    assert re.search(said, str(tiled.non_finite)), tiled.non_finite
    told = [r for r in caplog.records if "not finite" in r.getMessage()]
    assert len(told) == 1 and str(tiled.non_finite) in told[0].getMessage()


@pytest.mark.parametrize("way", [{"tiles": (2, 2)}, {"tiles": (2, 1), "halo": "share"}], ids=str)
def test_an_earlier_operator_is_found_in_a_later_tile(way: dict[str, Any]) -> None:
    x = torch.ones(1, 1, 8, 8).requires_grad_()
    with torch.no_grad():
        x[..., 1, 1] = -1.5  # a logarithm below zero, of which there is no root
        x[..., 6, 6] = -3.0  # of which there is no logarithm

    class Roots(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 2).log().sqrt()

    tiled = TiledModule(Roots(), **way)
    tiled(LazyImage(x)).sum().backward()
    assert tiled.non_finite is not None
    assert re.search(r"the result of log\b.*, in the tile \[4:8", str(tiled.non_finite)), tiled.non_finite


def test_looking_changes_nothing() -> None:
    """Statistics are moved once, random numbers go on, and gradients that are finite are plain PyTorch's."""

    def step(run: Any) -> tuple[nn.Module, float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).double()
        x = torch.randn(2, 3, 20, 20, dtype=torch.float64)
        y = run(net, x)
        (y[:, 0].mean().div(0) + y[:, 1].mean()).backward()
        return net, float(torch.rand(()))

    plain, number = step(lambda net, x: net(x).mean((2, 3))[..., None])
    tiled, other = step(lambda net, x: TiledModule(net, tiles=(2, 2))(LazyImage(x)).mean((2, 3))[..., None])
    assert number == other
    for (name, one), (_, two) in zip(plain.named_buffers(), tiled.named_buffers(), strict=True):
        assert difference(two.double(), one.double()) < 1e-9, name
    assert torch.equal(plain[2].bias.grad.isfinite(), tiled[2].bias.grad.isfinite())  # type: ignore[union-attr]


def test_a_loss_that_is_finite_is_not_looked_into() -> None:
    tiled = TiledModule(Small(""), tiles=(2, 2))
    tiled(LazyImage(torch.randn(1, 3, 24, 36))).sum().backward()
    assert tiled.non_finite is None


def test_a_loss_is_read_in_backward_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is not waited for after each forward; a loss that is dropped is never read, and leaves nothing."""
    read: list[bool] = []
    lost = finite.FiniteCheck.is_non_finite
    monkeypatch.setattr(finite.FiniteCheck, "is_non_finite", lambda look: read.append(lost(look)) or read[-1])
    tiled = TiledModule(Small(""), tiles=(2, 2))
    x = torch.randn(1, 3, 24, 36)
    tiled(x)
    loss = tiled(x).sum()
    assert not read
    loss.backward(retain_graph=True)
    loss.backward()
    assert read == [False]
    del loss
    gc.collect()
    assert tiled.non_finite is None and read == [False]
    net = Small("vector")
    assert TiledModule(net, tiles=(2, 2)).non_finite is None
    tiled = TiledModule(net, tiles=(2, 2))
    y = tiled(x)  # no backward follows where a user looks first
    assert not y.isfinite().all() and "the result of div" in str(tiled.non_finite)
