"""What only a CUDA device can show: its allocator's own count, transfers beside the kernels, a Trainer on it.

All other tests of the engine run there with `pytest --device cuda tests/lightning_plugin`.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_plugin import BudgetError, SFTStrategy, TiledModule, make_plan
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.cases import still
from tests.lightning_plugin.planner.chains import Recipe, recipes
from tests.lightning_plugin.strategy.training import trainer
from tests.zoo import ZOO, fill

pytestmark = pytest.mark.gpu
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def digits() -> Iterator[None]:
    """float32 is float32 (TF32, which convolutions use by default, has ten bits), and free memory is one piece."""
    former = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    yield
    torch.backends.cudnn.allow_tf32 = former


def measured(step: Callable[[], object], net: nn.Module, limit: int | None = None) -> int:
    """The most that the allocator gave out during a step, with what the network held before it; on a device that has
    no more than ``limit`` bytes for both."""
    standing = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - standing
    if limit is not None:
        there = torch.cuda.memory_reserved() - standing + limit
        torch.cuda.set_per_process_memory_fraction(there / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return torch.cuda.max_memory_allocated() - before


def triple(recipe: Recipe) -> dict[str, Any]:
    """One network at one size under one budget, drawn between the least and what plain PyTorch uses."""
    net = recipe.build().cuda()
    x = torch.randn(1, 3, recipe.side, recipe.side + 8, device="cuda")
    (net(x).sum()).backward()  # libraries take what they keep
    net.zero_grad(set_to_none=True)
    most = measured(lambda: net(x).sum().backward(), net)
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    with pytest.raises(BudgetError) as refused:
        TiledModule(net, budget=1000, disk=recipe.disk)(x)
    least = refused.value.smallest
    budget = max(256 * MIB, int(least + recipe.share * max(0, most - least)))
    tiled = TiledModule(net, budget=budget, disk=recipe.disk)

    def step() -> None:
        tiled(x).sum().backward()

    try:
        outside = measured(step, net, budget)
    except torch.cuda.OutOfMemoryError:
        outside = None
        net.zero_grad(set_to_none=True)
        print("beyond", budget, "needed", measured(step, net))
    plan = tiled.plan
    assert plan is not None
    errors = [difference(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True)]
    return {
        "recipe": repr(recipe),
        "plain": most,
        "budget": budget,
        "predicted": plan.peak_bytes,
        "workspaces": plan.forecast.reserve_bytes,
        "outside": outside,
        "own": tiled.peak_bytes,
        "tiers": sorted({s.tier for s in plan.segments}),
        "error": max(errors),
    }


def triples(examples: int, fixed: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    @seed(fixed)
    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(recipes())
    def every(recipe: Recipe) -> None:
        found.append(triple(replace(recipe, side=12 * recipe.side, width=4 * recipe.width)))

    every()
    return found


def test_steps_keep_their_budget_by_the_allocators_own_count(count: Any, record_result: Any) -> None:
    found = triples(count(ci=12, full=60), 1)
    record_result("cuda_memory", {"device": torch.cuda.get_device_name(), "triples": found})
    # Libraries take what is free for their workspaces: where there is no more than the budget, they take less.
    broken = [f for f in found if f["outside"] is None or f["outside"] > f["budget"] or f["error"] > 1e-3]
    assert not broken, broken


@pytest.mark.parametrize("name", ["resnet18", "vgg16_bn", "googlenet", "convnext_tiny"])
def test_networks_are_exact_with_maps_on_the_host_and_on_the_disk(name: str) -> None:
    entry = ZOO[name]
    net = still(fill(entry.build().double())).cuda()
    other, x = copy.deepcopy(net), torch.randn(2, entry.shape[1], 192, 160, dtype=torch.float64, device="cuda")
    with pytest.raises(BudgetError) as refused:
        make_plan(net, x, budget=1000, device="cuda")
    for host in (None, 0):
        for share in (1.02, 1.5, 3):
            net.zero_grad(), other.zero_grad()
            other.load_state_dict(net.state_dict())
            tiled = TiledModule(other, budget=int(share * refused.value.smallest), host_budget=host)
            for _ in range(3):  # races show in one step or another
                torch.manual_seed(1)
                expected = net(x)
                torch.manual_seed(1)
                actual = tiled(x)
                expected.square().sum().backward()
                actual.square().sum().backward()
                assert difference(actual.detach(), expected.detach()) < TOLERANCE
            floor = 1e-3 * max(p.grad.abs().max().item() for p in net.parameters() if p.grad is not None)
            for (path, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
                if p.grad is not None:
                    assert difference(q.grad, p.grad, floor) < TOLERANCE, (path, host, share, tiled.plan)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ZOO["resnet18"].build()
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y % out.shape[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", TOLERANCE), ("32-true", 2e-3), ("bf16-mixed", 0.1)])
def test_a_trainer_on_the_device_learns_the_same(precision: Any, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = Classifier()
    tiled = copy.deepcopy(plain)
    data = DataLoader(TensorDataset(torch.randn(6, 3, 300, 280).double(), torch.arange(6)), batch_size=2)
    if precision != "64-true":
        data = DataLoader(TensorDataset(data.dataset.tensors[0].float(), torch.arange(6)), batch_size=2)
    strategy = SFTStrategy(tiles=(3, 2))
    for module, how in ((plain, "auto"), (tiled, strategy)):
        torch.manual_seed(1)
        trainer(how, accelerator="gpu", precision=precision, max_epochs=2).fit(module, data)
    assert strategy.plan is not None
    losses = torch.tensor(plain.losses), torch.tensor(tiled.losses)
    assert difference(losses[1], losses[0]) < tolerance
