"""Chains: what is found to be one, and that what comes out is plain PyTorch's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.capture.chains import MAX_PERIOD
from lightning_plugin.chain import chains
from lightning_plugin.engine import Engine
from lightning_plugin.graph import Recording
from lightning_plugin.plan import Plan
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.compared import Step, differences, wrong
from tests.lightning_plugin.deep import AnyChain, deep_cases
from tests.lightning_plugin.networks import Case

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


# Any network


class Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.largest = 0.0

    def check(self, case: Case) -> None:
        try:
            plain = Step(case, None)
        except RuntimeError:
            self.counts["refused by PyTorch"] += 1
            assume(False)
        tiled = Step(case, case.plan)
        if not plain.loss.isfinite():
            assert not tiled.loss.isfinite()
            assume(False)
        found = differences(tiled, plain)
        assert not (errors := wrong(case, found)), f"tiled and plain differ: {errors}"
        worst = max(found.values(), default=0.0)
        assert isinstance(case.plan, AnyChain)
        self.counts["networks"] += 1
        self.counts["with a chain"] += case.plan.linked > 0
        self.counts["with streamed parameters"] += case.plan.streamed > 0
        self.counts["with dropped maps inside"] += case.plan.drops > 0
        self.counts["badly conditioned"] += worst >= TOLERANCE
        self.largest = max(self.largest, worst if worst < TOLERANCE else 0.0)


def run(tally: Tally, examples: int, fixed: int | None) -> None:
    @settings(max_examples=examples, phases=[Phase.generate, Phase.shrink], **QUIET)
    @given(deep_cases())
    def every(case: Case) -> None:
        tally.check(case)

    (seed(fixed)(every) if fixed is not None else every)()


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_sampled_deep_networks_are_exact(fixed: int) -> None:
    tally = Tally()
    run(tally, 6, fixed)
    assert tally.counts["with a chain"] >= 3


def test_fresh_deep_networks_are_exact() -> None:
    run(Tally(), 4, None)


@pytest.mark.full
def test_five_hundred_deep_networks_are_exact(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    tally = Tally()
    for part in range(5):
        run(tally, 110, 200 + part)
    assert tally.counts["with a chain"] >= 450
    assert tally.counts["badly conditioned"] <= 0.02 * tally.counts["networks"]
    record_result("exactness_deep", {**tally.counts, "largest error": tally.largest})


# What is a chain


class Block(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.second(torch.relu(self.first(x))))


class Normed(Block):
    def __init__(self, channels: int = 4) -> None:
        super().__init__(channels)
        self.norm, self.more = nn.BatchNorm2d(channels), nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.more(self.second(torch.relu_(self.norm(self.first(x))))))


class Walked(nn.Module):
    """Blocks in a list, walked by the module's own code."""

    def __init__(self, blocks: list[nn.Module], step: Callable[[nn.Module, Tensor, list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.first, self.blocks, self.step = nn.Conv2d(3, 4, 3, padding=1), nn.ModuleList(blocks), step

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.first(x)]
        for block in self.blocks:
            seen.append(self.step(block, seen[-1], seen))
        return seen[-1]


class Streams(nn.Module):
    """Two maps go on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv2d(3, 4, 3, padding=1), nn.ModuleList(Block() for _ in range(2 * count))

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.first(x)
        for left, right in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            a = a + left(b)
            b = b + right(a)
        return torch.cat([a, b], 1)


class Encoder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(count))
        self.blocks, self.token = nn.Sequential(*layers), nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0]


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *blocks)


def stages() -> nn.Module:
    down = [nn.Conv2d(4, 6, 3, 2), *(Normed(6) for _ in range(5)), nn.Conv2d(6, 8, 3, 2), *(Block(8) for _ in range(6))]
    return stack(*(Block() for _ in range(5)), *down)


def flat(count: int) -> nn.Module:
    """No module that is a link: four layers come again."""
    layers = (lambda: nn.Conv2d(4, 4, 3, padding=1)), nn.ReLU, (lambda: nn.Conv2d(4, 4, 1)), nn.Tanh
    return stack(*(layer() for _ in range(count) for layer in layers))


def frozen() -> nn.Module:
    net = stack(*(Normed() for _ in range(10)))
    for p in list(net.parameters())[:34]:
        p.requires_grad_(False)
    return net


def skip(block: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    return block(x) * seen[6] if len(seen) == 9 else block(x)


#: Networks, and how many links their chains have.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "blocks": (lambda: stack(*(Block() for _ in range(7))), [7]),
    "one block again and again": (lambda: stack(*[Block()] * 7), [7]),
    "normalised, in place": (lambda: stack(*(Normed() for _ in range(6))), [6]),
    "layers": (lambda: flat(6), [6]),
    "stages": (stages, [5, 5, 6]),
    "no stem": (lambda: nn.Sequential(*(Block(3) for _ in range(7))), [6]),
    "walked": (lambda: Walked([Block() for _ in range(8)], lambda b, x, _: b(x)), [8]),
    "a skip out of it": (lambda: Walked([Block() for _ in range(9)], skip), [6]),
    "two streams": (lambda: Streams(6), [5]),
    "transformer": (lambda: Encoder(6), [6]),
    "frozen first": (frozen, [4, 6]),
    "weight norm": (lambda: stack(*(nn.utils.parametrizations.weight_norm(Block().first) for _ in range(6))), [6]),
    "spectral norm": (lambda: stack(*(nn.utils.parametrizations.spectral_norm(Block().first) for _ in range(6))), [6]),
    "too few": (lambda: stack(*(Block() for _ in range(3))), []),
    "shrinking": (lambda: stack(*(nn.Conv2d(4, 4, 3) for _ in range(6))), []),
    "the first map for all": (lambda: Walked([Block() for _ in range(8)], lambda b, x, seen: b(x) + seen[0]), []),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_a_chain_and_that_it_is_exact(name: str) -> None:
    torch.manual_seed(4)
    build, links = NETWORKS[name]
    net = build().double()
    plain = copy.deepcopy(net)
    x = torch.randn(2, 3, 33, 36, dtype=torch.float64)
    image, like = x.clone().requires_grad_(), x.clone().requires_grad_()
    found: list[int] = []

    class Noting(AnyChain):
        def choose(self, recording: Recording) -> Plan:
            found.extend(op.count for _, _, op in chains(recording.nodes))
            return super().choose(recording)

    how = Noting(slots=2, share=0.3, stored=frozenset({3, 9}), kept=frozenset({0}), grids=((2, 3),))
    loss = net(LazyImage.from_tensor(image, engine=how)).square().mean()
    loss.backward()
    expected = plain(like).square().mean()
    expected.backward()
    assert sorted(found) == sorted(links)
    assert difference(loss, expected) < TOLERANCE
    compared(net, plain, [(image.grad, like.grad)])


def compared(net: nn.Module, plain: nn.Module, more: list[tuple[Any, Any]] | None = None) -> None:
    pairs = [(p.grad, q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    scale = max(b.abs().max().item() for _, b in pairs if b is not None)
    for a, b in (*pairs, *(more or [])):
        if b is not None:
            assert difference(a, b, 1e-3 * scale) < TOLERANCE
    for a, b in zip(net.buffers(), plain.buffers(), strict=True):
        assert difference(a, b) < TOLERANCE


# What a user may do


def engine_of(slots: int, share: float) -> Engine:
    return AnyChain(slots=slots, share=share, kept=frozenset(range(24)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(7)
    return stack(*(Block() for _ in range(9))).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 15, 18, dtype=torch.float64)


def test_dropout_is_the_same_when_a_link_runs_again(x: Tensor) -> None:
    """Positions, channels, and numbers on a vector: what a chain drops is what the same recording drops elsewhere."""

    class Drop(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout2d(F.dropout(super().forward(x), 0.3), 0.2)
            return x * F.dropout(x.mean((2, 3), keepdim=True), 0.4)

    torch.manual_seed(0)
    net = stack(*(Drop() for _ in range(7))).double()
    found = []
    for how in (None, engine_of(2, 0.3), engine_of(0, 0.0), engine_of(4, 1.0)):
        net.zero_grad()
        torch.manual_seed(11)
        net(LazyImage.from_tensor(x, engine=how)).square().mean().backward()
        after = torch.get_rng_state()
        found.append([after, *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]), "the generator goes on from where it was"
        assert all(difference(a, b) < TOLERANCE for a, b in zip(other[1:], found[0][1:], strict=True))


def test_a_graph_may_be_pulled_back_in_parts_and_again(net: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(net)
    loss = net(LazyImage.from_tensor(x, engine=engine_of(2, 0.2))).square().mean()
    expected = plain(x).square().mean()
    mine, theirs = list(net.parameters()), list(plain.parameters())
    for places in ([-1], [6, 11], [0], range(len(mine))):
        found = torch.autograd.grad(loss, [mine[i] for i in places], retain_graph=True)
        wanted = torch.autograd.grad(expected, [theirs[i] for i in places], retain_graph=True)
        assert all(difference(a, b) < TOLERANCE for a, b in zip(found, wanted, strict=True))
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    loss.backward()
    expected.backward()
    compared(net, plain)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_links_without_parameters_are_not_pulled_back_twice(x: Tensor) -> None:
    net = stack(*(nn.Sequential(nn.Tanh(), nn.Softplus()) for _ in range(6))).double()
    loss = net(LazyImage.from_tensor(x, engine=engine_of(1, 0.0))).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("place", [2, 8, -3])
def test_a_parameter_that_was_changed_is_refused(net: nn.Module, x: Tensor, place: int) -> None:
    loss = net(LazyImage.from_tensor(x, engine=engine_of(2, 0.0))).square().mean() + 0
    loss.item()
    with torch.no_grad():
        list(net.parameters())[place].add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        loss.backward()


def test_a_link_that_runs_again_for_a_later_one_is_checked_too(net: nn.Module, x: Tensor) -> None:
    """A gradient of the last link alone, and a first one that was changed."""
    loss = net(LazyImage.from_tensor(x, engine=engine_of(0, 0.0))).square().mean() + 0
    loss.item()
    with torch.no_grad():
        net[2].first.weight.add_(1)  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match="changed in place before"):
        torch.autograd.grad(loss, [net[9].first.weight])  # type: ignore[index, union-attr, list-item]


def test_evaluation_and_what_links_are_read_for(net: nn.Module, x: Tensor) -> None:
    """Without grad, and with a map inside that a hook has taken and somebody asks for later."""
    with torch.no_grad():
        found = net(LazyImage.from_tensor(x, engine=engine_of(0, 0.0))).mean((2, 3))
        assert difference(found + 0, net(x).mean((2, 3))) < TOLERANCE
    plain, taken = copy.deepcopy(net), {}
    for name, module in (("mine", net), ("plain", plain)):
        module[4].register_forward_hook(lambda m, args, out, name=name: taken.update({name: out}))  # type: ignore[index]
    out = net(LazyImage.from_tensor(x, engine=engine_of(1, 0.0)))
    first = out.square().mean()
    expected = plain(x)
    assert difference(first + 0, expected.square().mean()) < TOLERANCE
    loss = first + taken["mine"].mean()
    loss.backward()
    (expected.square().mean() + taken["plain"].mean()).backward()
    compared(net, plain)


def test_nothing_is_left_when_a_step_is_over(net: nn.Module, x: Tensor) -> None:
    how = engine_of(3, 0.2)
    parameters = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
    loss = net(LazyImage.from_tensor(x, engine=how)).square().mean() + 0
    assert how.ledger is None or how.ledger.live < parameters + (1 << 17)
    loss.backward()
    del loss
    assert how.ledger is not None and how.ledger.live <= parameters


@pytest.mark.slow
def test_depth_is_no_recursion() -> None:
    """Deeper than Python's stack, with hardly any room; links that read far are none."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh()) for _ in range(1100))).double()
    plain, x = copy.deepcopy(net), torch.randn(1, 1, 2, 3, dtype=torch.float64)
    tiled = TiledModule(net, budget="1MiB", chains="always")
    loss = tiled(x).square().sum()
    loss.backward()
    expected = plain(x).square().sum()
    expected.backward()
    assert difference(loss, expected) < TOLERANCE
    assert tiled.plan is not None and [c.count for c in tiled.plan.chains] == [1099]
    assert 2 * MAX_PERIOD < 1100
