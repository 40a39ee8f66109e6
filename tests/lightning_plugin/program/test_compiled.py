"""Compiled tiles give what tapes give, and where a tape cannot be compiled, it is said and nothing changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.program.compiled import Compiler
from tests.exactness import TOLERANCE
from tests.lightning_plugin.networks import Case, cases
from tests.lightning_plugin.test_random_networks import QUIET, Tally
from tests.zoo.resnet import BasicBlock, ResNet


class Counted(Compiler):
    """A compiler that counts the tiles it has run."""

    tiles = 0

    def call(self, *args):  # type: ignore[no-untyped-def]
        type(self).tiles += 1
        return super().call(*args)

    def try_out(self, *args):  # type: ignore[no-untyped-def]
        super().warm_up(*args)
        type(self).tiles -= 1  # no tile of a step


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tapes are compiled when they have run once."""
    monkeypatch.setattr("lightning_plugin.program.compiled.RUNS_BEFORE_COMPILING", 1)
    Counted.tiles = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


def run(examples: int, fixed: int | None) -> Tally:
    """Random networks whose tiles PyTorch traces and differentiates, by kernels of its own."""
    tally = Tally()

    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(cases())
    def every(case: Case) -> None:
        case.plan.compiler = Counted("tiles", backend="aot_eager")
        tally.check(case)
        torch.compiler.reset()

    (seed(fixed)(every) if fixed is not None else every)()
    return tally


@pytest.mark.parametrize("fixed", [12, None])
def test_random_networks_are_exact(fixed: int | None) -> None:
    tally = run(4, fixed)
    assert fixed is None or (tally.counts["networks"] >= 3 and Counted.tiles >= 20)


@pytest.mark.full
def test_many_random_networks_are_exact() -> None:
    """Of two networks in eleven some tiles are compiled: tapes of the others do not last, or mind where tiles lie."""
    tally = run(400, 8)
    assert tally.counts["networks"] >= 240 and Counted.tiles >= 400


def compiled(net: nn.Module, backend: str = "aot_eager", **options: object) -> TiledModule:
    tiled = TiledModule(net, **options)  # type: ignore[arg-type]
    tiled.engine.compiler = Counted("tiles", backend=backend)
    return tiled


def compare(net: nn.Module, tiled: TiledModule, x: Tensor) -> None:
    """Two steps of both, since the second finds its tapes compiled."""
    for _ in range(2):
        found = []
        for step in (net, tiled):
            net.zero_grad()
            loss = (step(LazyImage(x)) if step is tiled else step(x)).square().sum()
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
        for plain, ours in zip(*found, strict=True):
            assert float((plain - ours).abs().max()) <= TOLERANCE * max(1.0, float(plain.abs().max()))


def network() -> nn.Module:
    """Some operators of which a compiler makes one, a shortcut, and statistics that are known."""
    torch.manual_seed(0)
    net = ResNet(BasicBlock, (1, 1, 1, 1), width_mult=1 / 16, num_classes=3).double().eval()
    return nn.Sequential(net.conv1, net.bn1, net.relu, net.layer1)


@pytest.mark.slow
def test_the_compiler_of_pytorch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor's own kernels, in float64: what is in the middle of the map, of which there are enough tiles."""
    monkeypatch.setattr("lightning_plugin.program.compiled.RUNS_BEFORE_COMPILING", 10)
    net = network()
    compare(net, compiled(net, "inductor", tiles=(6, 6)), torch.randn(1, 3, 96, 96, dtype=torch.float64))
    assert Counted.tiles > 20


@pytest.mark.slow
def test_a_budget_is_kept_beside_compiled_tiles() -> None:
    net = network()
    tiled = compiled(net, budget="1MiB", halo="recompute")
    compare(net, tiled, torch.randn(1, 3, 512, 512, dtype=torch.float64))
    assert Counted.tiles > 20 and tiled.plan is not None and tiled.engine.ledger is not None
    assert tiled.engine.ledger.peak_bytes <= tiled.plan.peak_bytes <= 2**20


class Greatest(nn.Module):
    """The greatest values of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).amax((2, 3))


@pytest.mark.parametrize(
    ("net", "reason", "halo"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5)), "depends on the position of a tile", "recompute"),
        (Greatest(), "compares values with its result", "recompute"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)), "hand rows on", "share"),
    ],
    ids=["dropout", "maximum", "scan"],
)
def test_it_is_said_what_is_not_compiled(net: nn.Module, reason: str, halo: str) -> None:
    tiled = compiled(net, tiles=(4, 1), halo=halo)
    x = torch.randn(1, 3, 64, 64)
    with pytest.warns(UserWarning, match=reason):
        tiled(LazyImage(x)).sum().backward()
    assert not Counted.tiles


def test_a_compiler_that_fails_is_said_once_and_changes_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    tiled = compiled(net, backend="no such backend", tiles=(4, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare(net, tiled, torch.randn(1, 3, 64, 64, dtype=torch.float64))
    assert len([w for w in said if "not compiled" in str(w.message)]) == 1
    assert not Counted.tiles


def test_the_option_makes_a_compiler() -> None:
    net = nn.Conv2d(3, 2, 3)
    tiled = TiledModule(net, tiles=2, compile="graphs")
    assert tiled.engine.compiler is None
    tiled(LazyImage(torch.randn(1, 3, 8, 8)))
    with pytest.raises(ValueError, match="compile='always': give 'never', 'tiles', 'graphs'"):
        TiledModule(net, tiles=2, compile="always")  # type: ignore[arg-type]
