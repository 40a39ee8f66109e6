"""A call that is kept whole is the user's own code from the second time on, whatever changes between two steps."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import TiledModule
from lightning_plugin.capture import dispatch
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.outside import account
from tests.sampling import sampled

ROOMY = "64MiB"


class Block(nn.Module):
    """Convolutions, a BatchNorm, and what a user may change between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)
        self.doubled, self.calls, self.scales = False, 0, [1.0]
        self.register_buffer("weight", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = F.gelu(self.norm(self.first(x)))
        y = self.second(y) * (2 if self.doubled else 1) * sum(self.scales)
        if y.mean() > 0.05:
            y = y + 0.1
        return self.head(y.mean((2, 3))) * self.weight


def network(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block().double()


def image(seed: int, *size: int) -> Tensor:
    return torch.randn(size or (2, 3, 18, 22), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that are recorded."""
    found: list[str] = []
    record = dispatch.record_call

    def noted(func: Any, args: Any, kwargs: Any) -> Any:
        found.append(getattr(func, "__name__", "?"))
        return record(func, args, kwargs)

    monkeypatch.setattr(dispatch, "record_call", noted)
    return found


def assert_same(tiled: nn.Module, plain: nn.Module) -> None:
    """Compare parameters, gradients (None where plain PyTorch has None) and buffers."""
    floor = 1e-3 * max((float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None), default=0.0)
    for (name, p), q in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert difference(q.detach(), p.detach()) < TOLERANCE, name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert difference(q.grad, p.grad, floor) < TOLERANCE, name
    for (name, b), c in zip(plain.named_buffers(), tiled.named_buffers(), strict=True):
        assert difference(c[1], b) < TOLERANCE, name


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_the_second_call_is_plain_pytorch(mode: str, recorded: list[str]) -> None:
    plain = network().train(mode == "train")
    twin = copy.deepcopy(plain)
    tiled, peaks = TiledModule(twin, budget=ROOMY), []
    for seed in range(3):
        with torch.set_grad_enabled(mode != "no_grad"):
            recorded.clear()
            expected, found = plain(image(seed)), tiled(image(seed))
            assert bool(recorded) == (seed == 0)
        if seed:
            assert torch.equal(found, expected)
        if mode != "no_grad":
            expected.square().sum().backward()
            found.square().sum().backward()
        peaks.append(tiled.peak_bytes)
    assert peaks[0] > 10_000 and len(set(peaks)) == 1  # that of the recorded call
    assert_same(twin, plain)
    assert twin.calls == plain.calls


@pytest.mark.parametrize("options", [{"tiles": 2}, {"budget": "400KiB"}], ids=str)
def test_tiled_calls_are_recorded(options: dict[str, Any], recorded: list[str]) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1)
    tiled = TiledModule(nn.Sequential(*layers).double(), **options)
    for seed in range(2):
        recorded.clear()
        tiled(image(seed, 1, 3, 80, 80)).sum().backward()
        assert recorded


# What changes between two steps ---------------------------------------------------------------------------------------


def flag(net: Block) -> None:
    net.doubled = not net.doubled


def longer_list(net: Block) -> None:
    net.scales.append(0.5)


def momentum(net: Block) -> None:
    net.norm.momentum = 0.4


def hook(net: Block) -> None:
    net.second.register_forward_hook(lambda module, args, out: out * 1.5)


def freeze(net: Block) -> None:
    net.first.weight.requires_grad_(not net.first.weight.requires_grad)


def replace_buffer(net: Block) -> None:
    net.weight = net.weight * 1.5


def share(net: Block) -> None:
    net.second.bias = net.norm.bias


def modes(net: Block) -> None:
    net.norm.train(not net.norm.training)


def load(net: Block) -> None:
    net.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in net.state_dict().items()})


def new_layer(net: Block) -> None:
    generator = torch.Generator().manual_seed(3)
    net.head = nn.Linear(6, 4).double()
    for p in net.head.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)


def nothing(net: Block) -> None:
    """Leave the network as it is."""


CHANGES: tuple[Callable[[Block], None], ...] = (
    nothing, flag, longer_list, momentum, hook, freeze, replace_buffer, share, modes, load, new_layer
)  # fmt: skip


def ordinary(module: nn.Module, net: Block, seed: int) -> None:
    module(image(seed)).square().sum().backward()


def two_losses(module: nn.Module, net: Block, seed: int) -> None:
    y = module(image(seed))
    y.square().sum().backward(retain_graph=True)
    y.exp().mean().backward()


def two_calls(module: nn.Module, net: Block, seed: int) -> None:
    (module(image(seed)) * module(image(seed + 50))).sum().backward()


def other_size(module: nn.Module, net: Block, seed: int) -> None:
    module(image(seed, 1, 3, 15, 31)).square().sum().backward()


def without_grad(module: nn.Module, net: Block, seed: int) -> None:
    with torch.no_grad():
        module(image(seed))


def under_autocast(module: nn.Module, net: Block, seed: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        module(image(seed)).square().sum().backward()


def gradient_of_image(module: nn.Module, net: Block, seed: int) -> None:
    x = image(seed).requires_grad_()
    module(x).square().sum().backward()
    net.seen = x.grad


def part_called_apart(module: nn.Module, net: Block, seed: int) -> None:
    """The BatchNorm is part of a graph of plain PyTorch too."""
    other = net.norm(net.first(image(seed + 70)))
    (module(image(seed)).square().sum() + other.square().mean()).backward()


def an_exception(module: nn.Module, net: Block, seed: int) -> None:
    handle = net.second.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(image(seed))
    handle.remove()
    # What the call did until then is plain PyTorch's affair: the batch counts there.
    net.norm.reset_running_stats()


STEPS: tuple[Callable[[nn.Module, Block, int], None], ...] = (
    ordinary, ordinary, two_losses, two_calls, other_size, without_grad, under_autocast, gradient_of_image,
    part_called_apart, an_exception,
)  # fmt: skip


def compare_sequence(rng: random.Random, budget: str) -> None:
    plain = network(rng.randrange(99))
    twin = copy.deepcopy(plain)
    tiled = TiledModule(twin, budget=budget)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9) for net in (plain, twin)]
    for seed in range(rng.randint(3, 7)):
        change, step = rng.choice(CHANGES), rng.choice(STEPS)
        for module, net in ((plain, plain), (tiled, twin)):
            change(net)
            step(module, net, seed)
        assert_same(twin, plain)
        if hasattr(plain, "seen"):
            assert difference(twin.seen, plain.seen) < TOLERANCE
        if rng.random() < 0.7:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if rng.random() < 0.15:
            twin = copy.deepcopy(twin)
            tiled, plain = TiledModule(twin, budget=budget), copy.deepcopy(plain)
            optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in (plain, twin)]


@pytest.mark.parametrize("budget", [ROOMY, "1MiB", "300KiB"])
@pytest.mark.usefixtures("shared_plans")
def test_sequences_of_steps_between_which_something_changes(budget: str, count: Callable[..., int]) -> None:
    for seed in (*range(count(ci=1, full=350)), random.SystemRandom().randrange(1000, 10**9)):
        try:
            compare_sequence(random.Random(f"{budget} {seed}"), budget)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.3, *(pytest.param(share, marks=pytest.mark.full) for share in (2.0, 3.0, 5.0))])
def test_several_calls_keep_the_budget(share: float) -> None:
    """Calls whose graphs wait for one backward have one budget, whether they are recorded or not."""
    plain = network()
    twin = copy.deepcopy(plain)
    images = [image(seed, 1, 3, 64, 64) for seed in range(4)]

    def step(module: nn.Module, calls: int) -> None:
        module.zero_grad(set_to_none=True)
        torch.stack([module(x).square().sum() for x in images[:calls]]).sum().backward()

    one = account(lambda: step(plain, 1), plain).held
    budget = int(share * one)
    tiled = TiledModule(twin, budget=budget, calls=4)
    for calls in (1, 4, 2, 4):
        held = account(lambda n=calls: step(tiled, n), tiled).held  # type: ignore[misc]
        assert held <= budget + 2**10, (calls, held, budget)
        step(plain, calls)
        for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
            assert difference(q.grad, p.grad, 1e-3) < TOLERANCE  # type: ignore[arg-type]


def nothing(y: Tensor) -> Tensor:
    return y


def sort(y: Tensor) -> Tensor:
    return y.sort(3)[0]


def fft(y: Tensor) -> Tensor:
    return torch.fft.fft2(y).abs()


class Collected(nn.Module):
    """Code that holds all its intermediate results until it returns, of which autograd saves few."""

    def __init__(self, whole: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.whole = nn.Conv2d(3, 4, 3, padding=1), whole

    def forward(self, x: Tensor) -> Tensor:
        found = [self.whole(self.conv(x))]
        for _ in range(6):
            found.append(found[-1] * 2 + 1)
        return found[-1].std((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "share"), sampled([nothing, sort, fft], [1.05, 0.8, 0.6], every=3))
def test_code_that_holds_its_intermediate_results_keeps_the_budget(
    whole: Callable[[Tensor], Tensor], share: float
) -> None:
    net, x = Collected(whole), image(0, 1, 3, 64, 64).float()

    def step(module: nn.Module) -> None:
        net.zero_grad(set_to_none=True)
        module(x).square().sum().backward()

    budget = int(share * account(lambda: step(net), net).held)
    tiled = TiledModule(net, budget=budget)
    assert account(lambda: step(tiled), net).held <= budget + 2**10


def test_a_call_of_many_is_recorded_again(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_plugin.kept_calls.RECORDED_EVERY", 3)
    tiled, times = TiledModule(network(), budget=ROOMY), []
    for seed in range(9):
        recorded.clear()
        tiled(image(seed)).sum().backward()
        times.append(bool(recorded))
    assert times == [True, False, False, False, True, False, False, False, True]


def test_copies_begin_anew(recorded: list[str]) -> None:
    tiled = TiledModule(network(), budget=ROOMY)
    tiled(image(0)).sum().backward()
    for other in (copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled))):
        for expected in (True, False):
            recorded.clear()
            other(image(1)).sum().backward()
            assert bool(recorded) == expected


def test_a_module_within_a_kept_call_is_part_of_it(recorded: list[str]) -> None:
    inner = TiledModule(nn.Conv2d(3, 4, 3).double(), tiles=3)
    outer = TiledModule(nn.Sequential(inner, nn.ReLU()), budget=ROOMY)
    for expected in (True, False):
        recorded.clear()
        outer(image(1)).sum().backward()
        assert bool(recorded) == expected


def test_a_result_that_is_not_finite_is_searched_for_in_the_next_call() -> None:
    net = network()
    tiled = TiledModule(net, budget=ROOMY)
    for seed in range(2):
        tiled(image(seed)).sum().backward()
    with torch.no_grad():
        net.second.weight[0, 0, 0, 0] = float("nan")
    for seed in range(2):
        tiled(image(seed)).sum().backward()
    assert tiled.non_finite is not None and "second" in str(tiled.non_finite)
