"""A replay makes the calls that the tiles of a segment make, to the bit, on other data in each step.

Random networks under random plans are run three ways: in plain PyTorch, tile by tile, and by replays from the second
step on. Cotangents are zero in parts of some steps, so that tiles without one come and go.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, materialize
from lightning_plugin.graph import Recording
from lightning_plugin.plan import Plan
from lightning_plugin.program import replay
from lightning_plugin.program.replay import Recorder, Replay
from tests.exactness import TOLERANCE, compare, flat
from tests.lightning_plugin.compared import LEAST, mended
from tests.lightning_plugin.networks import AnyPlan, Case, cases
from tests.lightning_plugin.outside import account

QUIET: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
STEPS = 4


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are written down the first time that they run."""
    monkeypatch.setattr(replay, "FIRST_RECORDED", 1)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of replays that ran, and the obstacles that were met."""
    found: Counter[str] = Counter()
    call, finish = Replay.__call__, Recorder.finish

    def counted(self: Replay, given: Sequence[Tensor]) -> Any:
        found["replays"] += 1
        return call(self, given)

    def finished(self: Recorder, *args: Any) -> Replay | None:
        made = finish(self, *args)
        if self.obstacle is not None:
            found[self.obstacle] += 1
        return made

    monkeypatch.setattr(Replay, "__call__", counted)
    monkeypatch.setattr(Recorder, "finish", finished)
    return found


# Random networks ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LastingPlan(AnyPlan):
    """A plan that stays as long as what was recorded."""

    def choose(self, recording: Recording) -> Plan:
        if "plan" not in recording.derived:
            recording.derived["plan"] = super().choose(recording)
        return recording.derived["plan"]  # type: ignore[no-any-return]


@dataclass
class Left:
    """Outputs of a step, and its inputs and network with their gradients."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    net: nn.Module


def steps(case: Case, engine: AnyPlan | None) -> Iterator[Left]:
    """Run some steps on new data each."""
    net = copy.deepcopy(case.net) if engine is not None else mended(copy.deepcopy(case.net))
    for step in range(STEPS):
        yield run_step(case, engine, net, step)


def run_step(case: Case, engine: AnyPlan | None, net: nn.Module, step: int) -> Left:
    generator = torch.Generator().manual_seed(case.seed + step)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)
        for shape, grad in zip(case.shapes, case.grads, strict=True)
    ]
    net.zero_grad(set_to_none=True)
    images = inputs if engine is None else [LazyImage.from_tensor(x, engine=engine) for x in inputs]
    outputs = flat(net(*images))
    total = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        if step % 2:
            weight[..., weight.shape[-1] // 2 :] = 0
        total = total + (out * weight).sum()
    if total.requires_grad:
        total.backward()
    return Left([materialize(o).detach() for o in outputs], inputs, net)


def check(case: Case, counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {name: getattr(case.plan, name) for name in REPLAYED}
    plain, ours, other = steps(case, None), steps(case, LastingPlan(**drawn)), steps(case, LastingPlan(**drawn))
    for step in range(STEPS):
        try:
            expected = next(plain)
        except RuntimeError:  # PyTorch refuses the network: something needed for backward was overwritten
            counts["refused by PyTorch"] += 1
            assume(False)
        if not all(o.isfinite().all() for o in expected.outputs):
            counts["not finite in PyTorch"] += 1
            assume(False)
        found = next(ours)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "FIRST_RECORDED", 10**9)
            tile_by_tile = next(other)
        assert_equal(found, tile_by_tile, step)
        floor = max([LEAST, *(p.grad.abs().max().item() for p in expected.net.parameters() if p.grad is not None)])
        errors = compare(expected.net, found.net, found.outputs, expected.outputs, (None, None), floor=floor)
        assert max(errors.values()) < 1e-6, {name: e for name, e in errors.items() if not e < TOLERANCE}
        with torch.no_grad():
            for net in (expected.net, found.net, tile_by_tile.net):
                for p in net.parameters():
                    p.mul_(0.9)
    counts["networks"] += 1


#: What of a plan may be replayed: no shared halos, and nothing on the disk or on the host.
REPLAYED = ("stored", "kept", "grids", "cycle", "dropped", "deepest", "recalled", "pieces")


def assert_equal(found: Left, expected: Left, step: int) -> None:
    """The bits of replays are those of tiles."""
    pairs = list(zip(found.outputs, expected.outputs, strict=True))
    pairs += [(a.grad, b.grad) for a, b in zip(found.inputs, expected.inputs, strict=True)]
    pairs += [(a.grad, b.grad) for a, b in zip(found.net.parameters(), expected.net.parameters(), strict=True)]
    pairs += list(zip(found.net.buffers(), expected.net.buffers(), strict=True))
    for a, b in pairs:
        assert (a is None) == (b is None), step
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def run(counts: Counter[str], examples: int, fixed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=examples, phases=[Phase.generate, Phase.shrink], **QUIET)
    @given(cases())
    def every(case: Case) -> None:
        check(case, counts, monkeypatch)

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.parametrize("fixed", [1, None], ids=["fixed", "fresh"])
def test_replays_of_random_networks(
    fixed: int | None, count: Callable[..., int], replayed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    run(counts, count(ci=3, full=250), fixed, monkeypatch)
    assert counts["networks"] > 0
    assert replayed["replays"] > 2 * counts["networks"]


# Single cases ---------------------------------------------------------------------------------------------------------


def trained(net: nn.Module, inputs: Sequence[Tensor], **options: Any) -> list[list[Tensor]]:
    """Gradients and results of a step on each input."""
    found = []
    tiled = TiledModule(copy.deepcopy(net), **options) if options else copy.deepcopy(net)
    for x in inputs:
        tiled.zero_grad(set_to_none=True)
        out = tiled(x)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in tiled.parameters() if p.grad is not None)])
    return found


def assert_close(actual: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        for x, y in zip(a, e, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, step=step: f"step {step}: {text}")


class Net(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class Maximum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3))


def images(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def network(last: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Net(last).double()


def test_a_step_is_replayed(replayed: Counter[str]) -> None:
    net, x = network(lambda y: y.mean((2, 3))), images(4, 2, 3, 18, 21)
    assert_close(trained(net, x, tiles=(2, 3)), trained(net, x))
    assert replayed == {"replays": 3 * 4}  # two segments, forward and backward


def test_other_strides_are_another_replay(replayed: Counter[str]) -> None:
    net, x = network(lambda y: y.mean((2, 3))), images(6, 2, 3, 18, 21)
    x[2:4] = [t.to(memory_format=torch.channels_last) for t in x[2:4]]
    assert_close(trained(net, x, tiles=(2, 3)), trained(net, x))
    assert set(replayed) == {"replays"}


def test_what_is_decided_by_numbers_is_not_written_down(replayed: Counter[str]) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 1), Maximum()).double(), images(4, 1, 3, 16, 16)
    x[1] = torch.ones_like(x[1])  # every position is a maximum
    assert_close(trained(net, x, tiles=(2, 2)), trained(net, x))
    assert replayed["aten._local_scalar_dense.default"] > 0


def test_tiles_without_a_cotangent_come_and_go(replayed: Counter[str]) -> None:
    net, found = network(lambda y: y), []
    plain, tiled = copy.deepcopy(net), TiledModule(copy.deepcopy(net), tiles=(2, 2))
    for step, x in enumerate(images(8, 1, 3, 16, 16)):
        weight = torch.ones(16, 16, dtype=torch.float64)
        weight[:, 8:] = step % 3 == 1
        for module in (plain, tiled):
            module.zero_grad(set_to_none=True)
            (module(x) * weight).square().sum().backward()
        found.append(([p.grad for p in tiled.parameters()], [p.grad for p in plain.parameters()]))
        assert_close(*zip(*found, strict=True))
        found.clear()
    assert replayed["tiles without a cotangent are left out"] == 1
    assert replayed["replays"] > 8


def test_random_numbers_are_drawn_anew(replayed: Counter[str]) -> None:
    net, x = network(lambda y: F.dropout(y, 0.5).mean((2, 3))), images(1, 1, 3, 16, 16)[0]
    tiled = TiledModule(net, tiles=(2, 2))
    results = [tiled(x).detach() for _ in range(6)]
    assert len({r.sum().item() for r in results}) == 6
    torch.manual_seed(3)
    first = tiled(x).detach()
    torch.manual_seed(3)
    assert torch.equal(tiled(x).detach(), first)


def test_tensors_made_of_numbers_keep_their_values(replayed: Counter[str]) -> None:
    net, x = network(lambda y: F.interpolate(y, (23, 11), mode="bilinear").mean((2, 3))), images(4, 1, 3, 16, 16)
    assert_close(trained(net, x, tiles=(2, 2)), trained(net, x))
    assert set(replayed) == {"replays"}


def test_one_tensor_given_twice_is_no_replay() -> None:
    x = torch.ones(2, 3)
    assert Recorder([x, x.detach()]).obstacle == "two inputs are one tensor"


def test_a_tensor_from_elsewhere_is_an_obstacle() -> None:
    x, other = torch.ones(2, 3), torch.ones(2, 3)
    recorder = Recorder([x])
    with recorder:
        y = x * other
    assert recorder.finish(1, [y], 0) is None
    assert recorder.obstacle == "a tensor of shape (2, 3) was neither given nor made"


def test_calls_without_a_use_are_left_out_and_tensors_are_freed() -> None:
    x = torch.ones(4)
    recorder = Recorder([x])
    with recorder:
        x.exp()
        y = torch.zeros(4).add_(x, alpha=float("inf")).view(2, 2).view(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    made = recorder.finish(1, [y, None], 0)
    assert made is not None
    calls = made.function.__code__.co_names
    assert len(calls) == 5 + 1 + 1, calls  # zeros, add_, two views, clone, mul; two constants
    (twice, nothing) = made([x])
    assert nothing is None
    torch.testing.assert_close(twice, y)
    assert not twice.requires_grad


def test_a_replay_holds_what_was_planned() -> None:
    """The peak of a replayed step, by the allocator's own books, against the ledger's."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    x = torch.randn(1, 3, 96, 96)
    tiled = TiledModule(net, tiles=(3, 3))

    def step() -> None:
        tiled.zero_grad(set_to_none=True)
        tiled(x).square().sum().backward()

    step()
    planned = tiled.peak_bytes
    for _ in range(2):
        held = account(step, net)
        assert held.held <= planned
        assert tiled.peak_bytes <= planned


def test_replays_of_a_segment_are_bounded(replayed: Counter[str]) -> None:
    net, x = network(lambda y: y.mean((2, 3))), images(1, 1, 3, 16, 16)[0]
    tiled = TiledModule(net, tiles=(2, 2))
    for _ in range(3):
        for parameters in (list(net.parameters())[i:] for i in range(6)):
            for p in net.parameters():
                p.requires_grad_(any(p is q for q in parameters))
            tiled(x).sum().backward()
    kept = [r for r in replay_tables(tiled) if len(r.known) > replay.MAX_REPLAYS]
    assert not kept


def replay_tables(tiled: TiledModule) -> list[replay.Replays]:
    import gc

    return [o for o in gc.get_objects() if isinstance(o, replay.Replays)]
