"""Parameters that live below the device: what the user holds stays what it is, and nothing is ever stale.

Random networks with streamed parameters are part of `test_random_networks`; here is what a user may do with them.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from lightning_plugin import BudgetError, Plan, TiledModule, make_plan
from lightning_plugin.errors import DiskError, EngineError, RecordingError
from lightning_plugin.residency.disk import UnnamedFile
from lightning_plugin.residency.homes import Homes
from tests.exactness import TOLERANCE, difference
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("shared_plans")

WIDTH = 96


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, t, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, width))
        return x + self.narrow(F.gelu(self.wide(x)))


class Encoder(nn.Module):
    """Patches of a bag, each through the same blocks; then their mean."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1).mean(0))


@pytest.fixture
def net() -> Encoder:
    torch.manual_seed(5)
    return Encoder().double()


@pytest.fixture
def bag() -> Tensor:
    return torch.randn(12, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def parameter_bytes(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


def tight(net: nn.Module, **options: Any) -> TiledModule:
    """The module under a budget of less than its parameters alone."""
    return TiledModule(net, budget=int(0.9 * parameter_bytes(net)), **{"parameters": "host", **options})


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(1.0, 4.0, dtype=out.dtype)).square().sum()


def step(run: nn.Module, bag: Tensor, more: Callable[[nn.Module], Tensor | float] = lambda run: 0.0) -> Tensor:
    out = run(bag)
    (loss_of(out) + more(run)).backward()
    return out.detach()


def same(one: nn.Module, other: nn.Module) -> None:
    """The same values and gradients."""
    largest = max(float(p.grad.abs().max()) for p in other.parameters() if p.grad is not None)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert difference(p.detach(), q.detach()) < TOLERANCE, name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.device == p.device and p.grad.shape == p.shape
            assert difference(p.grad, q.grad, 1e-3 * largest) < TOLERANCE, name


def streamed(plan: Plan | None) -> tuple[int, ...]:
    assert plan is not None
    return (*plan.on_host, *plan.on_disk)


@pytest.mark.parametrize(("optimizer", "tier"), sampled(["SGD", "AdamW"], ["host", "disk"], every=2))
def test_training_is_that_of_plain_pytorch(net: Encoder, bag: Tensor, tier: str, optimizer: str) -> None:
    plain = copy.deepcopy(net)
    tiled = tight(net, parameters=tier)
    pairs = [(m, getattr(torch.optim, optimizer)(m.parameters(), lr=1e-3)) for m in (plain, tiled)]
    before = [id(p) for p in net.parameters()]
    for _ in range(3):
        outs = []
        for module, optim in pairs:
            optim.zero_grad()
            outs.append(step(module, bag))
            optim.step()
        assert difference(outs[1], outs[0]) < TOLERANCE
    same(net, plain)
    assert [id(p) for p in net.parameters()] == before, "the user's parameters are the ones that are trained"
    assert streamed(tiled.plan) and tiled.plan is not None
    assert tiled.peak_bytes <= tiled.plan.peak_bytes <= 0.9 * parameter_bytes(net)


def test_nothing_is_streamed_where_all_fits(net: Encoder, bag: Tensor) -> None:
    tiled = TiledModule(net, budget="1GiB", parameters="host")
    step(tiled, bag)
    assert not streamed(tiled.plan)


@pytest.mark.slow
def test_who_wants_none_to_leave_is_told_what_is_needed(net: Encoder, bag: Tensor) -> None:
    with pytest.raises(BudgetError, match="Parameters and gradients alone take"):
        step(tight(net, parameters="device"), bag)
    with pytest.raises(BudgetError, match="stay on the device; the rest is fetched") as refused:
        step(TiledModule(net, budget="100KiB", parameters="host"), bag)
    plain = copy.deepcopy(net)
    enough = TiledModule(net, budget=refused.value.smallest, parameters="host")
    step(enough, bag)
    step(plain, bag)
    same(net, plain)
    assert enough.peak_bytes <= refused.value.smallest < parameter_bytes(net) < 4 * 2**20


# What a user may do with parameters


def everywhere(module: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in module.parameters()), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.full)])
def test_a_regulariser_reads_them_in_the_loss(net: Encoder, bag: Tensor, tier: str) -> None:
    plain = copy.deepcopy(net)
    tiled = tight(net, parameters=tier)
    for module in (plain, tiled):
        step(module, bag, everywhere)
        step(module, bag, everywhere)  # and gradients are added up
    same(net, plain)


@pytest.mark.slow
@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.full), "disk"])
def test_what_is_written_between_steps_is_what_the_next_one_uses(net: Encoder, bag: Tensor, tier: str) -> None:
    plain, other = copy.deepcopy(net), Encoder().double()
    tiled = tight(net, parameters=tier)
    step(tiled, bag)
    step(plain, bag)
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.load_state_dict(other.state_dict()),
        lambda m: [p.data.mul_(0.9) for p in m.parameters()],
        lambda m: [setattr(p, "data", p.detach() + 0.01) for p in m.parameters()],
        lambda m: nn.init.ones_(m.blocks[0].wide.weight),
        lambda m: m.load_state_dict(other.state_dict(), assign=True),
        lambda m: m.float().double(),
    ]
    for change in changes:
        for module in (plain, net):
            change(module)
            module.zero_grad()
        assert difference(step(tiled, bag), step(plain, bag)) < TOLERANCE
        same(net, plain)


def test_a_parameter_that_changes_within_a_step_is_refused(net: Encoder, bag: Tensor) -> None:
    tiled = tight(net)
    step(tiled, bag)
    loss = loss_of(tiled(bag))
    with torch.no_grad():
        net.blocks[1].wide.weight.mul_(2)
    with pytest.raises(RecordingError, match="was changed in place"):
        loss.backward()


def test_a_parameter_that_changes_within_backward_is_refused(net: Encoder, bag: Tensor) -> None:
    """Also where its copy was fetched ahead already."""

    def change(_: Tensor) -> None:
        with torch.no_grad():
            for block in net.blocks[:2]:
                block.qkv.weight.mul_(2)

    tiled = tight(net)
    step(tiled, bag)
    net.blocks[2].wide.weight.register_hook(change)
    with pytest.raises(RecordingError, match="was changed in place"):
        step(tiled, bag)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_go_both_ways_and_copies_are_copies(net: Encoder, bag: Tensor, tier: str, tmp_path: Any) -> None:
    plain = copy.deepcopy(net)
    tiled = tight(net, parameters=tier)
    average = AveragedModel(net)
    for module in (plain, tiled):
        step(module, bag)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    average.update_parameters(net)
    torch.save(tiled.state_dict(), tmp_path / "weights")
    fresh = Encoder().double()
    fresh.load_state_dict(torch.load(tmp_path / "weights", weights_only=True))
    for name, value in plain.state_dict().items():
        assert difference(fresh.state_dict()[name], value) < TOLERANCE
        assert difference(average.module.state_dict()[name], value) < TOLERANCE
    kept = copy.deepcopy(net)
    with torch.no_grad():
        net.head.weight.zero_()
    assert float(kept.head.weight.detach().abs().max()) > 0


def test_hooks_tied_weights_and_frozen_parameters(bag: Tensor) -> None:
    def made() -> tuple[Encoder, list[str]]:
        torch.manual_seed(1)
        net, seen = Encoder().double(), list[str]()
        net.blocks[2].wide.weight = net.blocks[0].wide.weight
        net.blocks[1].requires_grad_(False)
        net.blocks[0].qkv.weight.register_hook(lambda g: seen.append("tensor") or 2 * g)
        net.blocks[0].qkv.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
        return net, seen

    (net, seen), (plain, expected) = made(), made()
    plain(bag).sum().backward()
    tight(net)(bag).sum().backward()
    same(net, plain)
    assert sorted(seen) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weight_norm", pytest.param("orthogonal", marks=pytest.mark.full)])
def test_parametrizations(net: Encoder, bag: Tensor, how: str) -> None:
    for block in net.blocks:
        getattr(parametrizations, how)(block.wide)
    plain = copy.deepcopy(net)
    tiled = TiledModule(net, budget=int(2 * parameter_bytes(net)), parameters="host")
    step(tiled, bag)
    step(plain, bag)
    same(net, plain)
    assert streamed(tiled.plan)


@pytest.mark.slow
def test_requires_grad_may_be_toggled(net: Encoder, bag: Tensor) -> None:
    plain, tiled = copy.deepcopy(net), tight(net)
    for free in (True, False, True):
        for module in (plain, net):
            module.zero_grad()
            module.blocks[1].requires_grad_(free)
        step(tiled, bag)
        step(plain, bag)
        same(net, plain)


def test_evaluation_and_a_retained_graph(net: Encoder, bag: Tensor) -> None:
    plain, tiled = copy.deepcopy(net), tight(net)
    step(tiled, bag)
    with torch.no_grad():
        assert difference(tiled(bag), plain(bag)) < TOLERANCE
    for module in (plain, tiled):
        module.zero_grad()
        loss = loss_of(module(bag))
        loss.backward(retain_graph=True)
        loss.backward()
    same(net, plain)


def test_copies_are_gone_after_each_pass(net: Encoder, bag: Tensor) -> None:
    tiled = tight(net)
    step(tiled, bag)
    ledger = tiled.engine.ledger
    assert ledger is not None
    on_device = sum(p.nbytes * 2 for p in net.parameters() if p not in tiled.engine.homes)
    assert ledger.live <= on_device + 1024


# The disk


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not say which files are open")
def test_files_go_with_what_lies_in_them(net: Encoder, bag: Tensor) -> None:
    gc.collect()  # files of tests before this one would be closed within it
    before = open_files()
    tiled = tight(net, parameters="disk")
    step(tiled, bag)
    assert open_files() > before
    net.zero_grad()
    gradients = open_files()
    step(tiled, bag)
    assert open_files() > gradients
    for p in list(net.parameters()):
        p.data, p.grad = p.detach().clone(), None
    assert open_files() <= before + 1


def test_a_full_disk_is_an_error_that_says_so(
    net: Encoder, bag: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=f"{tmp_path} has no room for .* more: No space left"):
        step(tight(net, parameters="disk", disk=str(tmp_path)), bag)


def test_a_system_that_cannot_reserve_space(net: Encoder, bag: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS: zeros are written, so that the space is taken all the same."""
    monkeypatch.delattr(os, "posix_fallocate")
    plain, tiled = copy.deepcopy(net), tight(net, parameters="disk")
    step(tiled, bag)
    step(plain, bag)
    same(net, plain)
    assert list(tiled.engine.homes)
    file = UnnamedFile("a parameter")
    file.reserve(3 << 20)
    assert os.fstat(file.number).st_size == 3 << 20 and file.allocated_bytes >= 3 << 20


# Modules without data


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.full), "disk"])
def test_a_module_is_built_where_it_will_live(bag: Tensor, tier: str) -> None:
    plain = Encoder().double()
    with torch.device("meta"):
        net = Encoder().double()
        net.blocks[2].wide.weight = net.blocks[0].wide.weight
    plain.blocks[2].wide.weight = plain.blocks[0].wide.weight
    tiled = tight(net, parameters=tier)
    tiled.build(plain.state_dict())
    assert net.blocks[2].wide.weight is net.blocks[0].wide.weight
    step(tiled, bag)
    step(plain, bag)
    same(net, plain)


class Placed(Encoder):
    """An embedding of places is added to the patches: a map that is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(WIDTH, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks((self.patches(x) + self.places).flatten(2).transpose(1, 2)).mean(1).mean(0))


def test_a_parameter_that_a_map_is_made_of_comes_back_to_the_device(bag: Tensor) -> None:
    torch.manual_seed(0)
    plain = Placed().double()
    with torch.device("meta"):
        net = Placed().double()
    tiled = tight(net, parameters="disk")
    tiled.build(plain.state_dict())
    homes = tiled.engine.homes
    assert homes.file(net.places) is not None
    for _ in range(2):
        step(tiled, bag)
        step(plain, bag)
    same(net, plain)
    assert homes.file(net.places) is None and homes.file(net.patches.weight) is not None


def test_a_module_that_builds_itself(bag: Tensor) -> None:
    def filled(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.01)

    with torch.device("meta"):
        net = Encoder()
    torch.manual_seed(0)
    TiledModule(net, budget="1GiB").build()
    torch.manual_seed(0)
    assert torch.equal(net.patches.weight, nn.Conv2d(3, WIDTH, 4, 4).weight)
    with torch.device("meta"):
        other = nn.MultiheadAttention(8, 2)
        odd = nn.Module()
        odd.scale = nn.Parameter(torch.zeros(3))
    TiledModule(other, budget="1GiB").build(initialize=filled)
    assert float(other.in_proj_weight.detach().min()) == pytest.approx(0.01)
    with pytest.raises(EngineError, match="Module has parameters without data and no reset_parameters"):
        TiledModule(odd, budget="1GiB").build()
    with torch.device("meta"):
        odd.scale = nn.Parameter(torch.zeros(3))
    with pytest.raises(EngineError, match="'scale' had no data, and nothing has filled it"):
        TiledModule(odd, budget="1GiB").build(initialize=lambda m: None)
    with torch.device("meta"):
        net = Encoder()
    with pytest.raises(EngineError, match=r"nothing for 'patches\.weight'"):
        TiledModule(net, budget="1GiB").build({"head.bias": torch.zeros(3)})


# Plans


@pytest.mark.slow
def test_plans_say_what_is_streamed(net: Encoder) -> None:
    budget = parameter_bytes(net)
    plan = make_plan(net, (12, 3, 16, 16), budget=budget, parameters="host", dtype=torch.float64)
    assert streamed(plan) and plan.forecast.streamed_bytes > 0
    assert Plan.from_json(plan.to_json()) == plan
    assert "parameters" in str(plan)
    more = make_plan(net, (12, 3, 16, 16), budget="6MiB", parameters="host", dtype=torch.float64, optimizer="adamw")
    none = make_plan(net, (12, 3, 16, 16), budget="6MiB", parameters="host", dtype=torch.float64)
    assert streamed(more) and not streamed(none), "what the optimizer will keep counts"


@pytest.mark.parametrize("failing", [3, 6, 9])
def test_a_backward_pass_that_failed_keeps_no_memory(
    net: Encoder, bag: Tensor, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is under the same budget, and exact: PyTorch would keep gradients of the pass that failed."""
    plain = copy.deepcopy(net)
    step(plain, bag)
    tiled = tight(net, parameters="disk")
    step(tiled, bag)
    net.zero_grad()
    made = tempfile.TemporaryFile
    count = itertools.count(1)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if next(count) == failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return made(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(DiskError, match="could not be made: Too many open files"):
            step(tiled, bag)
    net.zero_grad()
    step(tiled, bag)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert difference(mine.grad, theirs.grad, 1e-3) < TOLERANCE  # type: ignore[arg-type]
    assert tiled.plan is not None and tiled.peak_bytes <= tiled.plan.budget  # type: ignore[operator]


def test_a_gradient_is_not_lost_where_a_parameter_cannot_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = nn.Parameter(torch.ones(4))
    tensor.grad = torch.full((4,), 2.0)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(DiskError):
        Homes().place(tensor, "disk", torch.device("cpu"))
    assert tensor.tolist() == [1.0] * 4 and tensor.grad.tolist() == [2.0] * 4
