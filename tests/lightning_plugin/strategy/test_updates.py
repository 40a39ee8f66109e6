"""Streamed parameters are updated one by one, within backward where nobody looks, and the training is the same."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_plugin import Plan, SFTStrategy
from lightning_plugin.kept_calls import is_untiled
from lightning_plugin.strategy.feedback import Feedback
from lightning_plugin.strategy.update import BY_PARAMETER, GRADIENT_HOOKS
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.strategy.training import trainer
from tests.lightning_plugin.test_streamed import Encoder, parameter_bytes

pytestmark = pytest.mark.usefixtures("shared_plans")

STEPS = 3


class Bags(Dataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"bag": torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator)}


class Module(pl.LightningModule):
    """An encoder with any optimizer; with ``manual``, it calls the optimizer itself."""

    def __init__(self, net: nn.Module, optimizer: str, manual: bool = False, **options: Any) -> None:
        super().__init__()
        self.net, self.kind, self.options = net, optimizer, options
        self.automatic_optimization = not manual

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = (self.net(batch["bag"]) - 1).square().sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def tight(net: nn.Module, tier: str) -> SFTStrategy:
    return SFTStrategy(budget=int(1.3 * parameter_bytes(net)), parameters=tier, tile_over=1)


def fitted(module: pl.LightningModule, strategy: Any = "auto", steps: int = STEPS, **options: Any) -> pl.Trainer:
    run = trainer(strategy, max_steps=steps, max_epochs=-1, precision="64-true", **options)
    run.fit(module, DataLoader(Bags(), batch_size=None))
    return run


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert difference(p.detach(), q.detach()) < TOLERANCE, name


@pytest.fixture
def net() -> Encoder:
    torch.manual_seed(2)
    return Encoder(2)


@pytest.mark.parametrize(
    ("tier", "optimizer", "options", "trained", "fused"),
    [
        ("host", "SGD", {"lr": 1e-2, "momentum": 0.9}, {}, True),
        ("disk", "AdamW", {"lr": 1e-3}, {}, True),
        ("host", "AdamW", {"lr": 1e-3, "foreach": True}, {}, True),
        pytest.param("disk", "RMSprop", {"lr": 1e-3}, {}, True, marks=pytest.mark.full),
        ("disk", "AdamW", {"lr": 1e-3}, {"gradient_clip_val": 0.1}, False),
        ("host", "SGD", {"lr": 1e-2}, {"accumulate_grad_batches": 2}, False),
        ("disk", "SGD", {"lr": 1e-2, "manual": True}, {}, False),
    ],
)
def test_training_is_the_same(
    net: Encoder, tier: str, optimizer: str, options: dict[str, Any], trained: dict[str, Any], fused: bool
) -> None:
    plain, streamed = (Module(copy.deepcopy(net), optimizer, **options) for _ in range(2))
    fitted(plain, **trained)
    strategy = tight(streamed.net.double(), tier)
    run = fitted(streamed, strategy, **trained)
    same(streamed, plain)
    assert strategy.plan is not None and (strategy.plan.on_host or strategy.plan.on_disk)
    assert strategy.peak_bytes <= 1.3 * parameter_bytes(streamed.net)
    homes = strategy.engine.homes
    assert strategy._updates_in_backward is fused
    below = [p for p in streamed.parameters() if p in homes]
    assert below and all((p.grad is None) is fused for p in below)
    if tier == "disk":
        state = run.optimizers[0].state
        assert all(
            homes.file(t) is not None for p in below for t in state[p].values() if torch.is_tensor(t) and t.dim()
        )


def test_a_backward_pass_beside_training_changes_nothing(net: Encoder) -> None:
    module = Module(net, "SGD", lr=1e-2)
    strategy = tight(net.double(), "host")
    fitted(module, strategy, steps=1)
    assert strategy._updates_in_backward
    before = [p.detach().clone() for p in net.parameters()]
    net(Bags()[0]["bag"]).sum().backward()
    assert all(torch.equal(p, q) and p.grad is not None for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("name", GRADIENT_HOOKS)
def test_whoever_looks_at_gradients_sees_them(net: Encoder, name: str) -> None:
    seen: list[int] = []

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(sum(p.grad is not None for p in self.parameters()))
        return getattr(pl.LightningModule, name)(self, *args, **kwargs)

    module = type("Looking", (Module,), {name: look})(net, "SGD", lr=1e-2)
    strategy = tight(net.double(), "host")
    fitted(module, strategy, steps=2)
    assert seen and not strategy._updates_in_backward
    assert max(seen) == len(list(net.parameters()))


def test_hooks_of_an_optimizer_and_others_than_pytorchs_own(net: Encoder) -> None:
    class Own(torch.optim.SGD):
        pass

    assert Own not in BY_PARAMETER
    plain = copy.deepcopy(net)
    calls: list[str] = []
    for which, module in (("plain", plain), ("streamed", net)):

        class Hooked(Module):
            def configure_optimizers(self, which: str = which) -> Any:
                optimizer = Own(self.parameters(), lr=1e-2)
                optimizer.register_step_post_hook(lambda *_: calls.append(which))
                return optimizer

        fitted(Hooked(module, "SGD"), "auto" if which == "plain" else tight(module.double(), "disk"))
    same(net, plain)
    assert calls.count("plain") == calls.count("streamed") == STEPS


def run_twice(net: Encoder, strategy: Any, **trained: Any) -> Module:
    """Two fits of one Trainer, each with an optimizer of its own, of which only the first moves anything."""
    module = Module(net, "AdamW", lr=1e-2)
    run = fitted(module, strategy, **trained)
    module.options = {"lr": 1e-4, "weight_decay": 0.3}
    run.fit_loop.epoch_loop.max_steps = 2 * STEPS
    run.fit(module, DataLoader(Bags(), batch_size=None))
    assert run.global_step == 2 * STEPS
    return module


@pytest.mark.parametrize(("tier", "trained"), [("host", {}), ("disk", {"gradient_clip_val": 0.1})])
def test_a_second_fit_steps_its_own_optimizer(net: Encoder, tier: str, trained: dict[str, Any]) -> None:
    plain = run_twice(copy.deepcopy(net), "auto", **trained)
    strategy = tight(net.double(), tier)
    same(run_twice(net, strategy, **trained), plain)
    assert strategy.engine.homes


def test_a_second_fit_leaves_room_for_its_own_optimizer(net: Encoder) -> None:
    strategy, fresh = (SFTStrategy(budget="8MiB", tile_over=1) for _ in range(2))
    module, other = Module(net.double(), "AdamW", lr=1e-3), Module(copy.deepcopy(net), "SGD", lr=1e-3)
    run = fitted(module, strategy)
    module.kind = "SGD"
    run.fit_loop.epoch_loop.max_steps = 2 * STEPS
    run.fit(module, DataLoader(Bags(), batch_size=None))
    fitted(other, fresh)
    assert strategy.engine.planner.reserved == fresh.engine.planner.reserved == 0
    assert strategy.peak_bytes == fresh.peak_bytes
    assert strategy.engine.optimizer_bytes.keys() == {id(p) for p in module.parameters()}


@pytest.mark.parametrize(("kind", "how", "streams"), [("SGD", "wraps", True), ("AdamW", "bare", False)])
def test_an_optimizers_step_is_called_once_a_step(
    net: Encoder, kind: str, how: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever replaces the step of an optimizer's class is called as often as without us, and does what it does."""
    optimizer, calls = getattr(torch.optim, kind), []
    whole = optimizer.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(optimizer, "step", functools.wraps(whole)(counted) if how == "wraps" else counted)
    plain, streamed = (Module(copy.deepcopy(net), kind, lr=1e-2) for _ in range(2))
    fitted(plain)
    assert len(calls) == STEPS
    strategy = tight(streamed.net.double(), "host") if streams else SFTStrategy(budget="64MiB", tile_over=1)
    fitted(streamed, strategy)
    same(streamed, plain)
    assert bool(strategy.engine.homes) is streams and len(calls) == 2 * STEPS


def epochs(module: pl.LightningModule, strategy: Any, count: int, checkpoint: Path | None = None) -> pl.Trainer:
    run = trainer(strategy, max_epochs=count)
    run.fit(module, DataLoader(Bags(), batch_size=None), ckpt_path=checkpoint, weights_only=False)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.full), "disk"])
def test_checkpoints_go_on_and_go_both_ways(net: Encoder, tier: str, tmp_path: Path) -> None:
    half, plains = tmp_path / "half.ckpt", tmp_path / "plain.ckpt"
    whole, first, second, plain, other, third = (
        Module(copy.deepcopy(net).double(), "AdamW", lr=1e-3) for _ in range(6)
    )
    epochs(whole, tight(whole.net, tier), 2)
    epochs(first, tight(first.net, tier), 1).save_checkpoint(half)
    epochs(second, tight(second.net, tier), 2, half)
    for p, q in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q), "as if it had not been interrupted, to the bit"
    epochs(plain, "auto", 2, half)
    same(plain, whole)
    epochs(other, "auto", 1).save_checkpoint(plains)
    epochs(third, tight(third.net, tier), 2, plains)
    same(third, whole)


def test_each_step_on_streamed_parameters_fetches_them(net: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of which the plan cuts nothing: the module as it is written would read them where they lie."""
    plans: list[Plan] = []
    original = Feedback.on_plan_run

    def noted(self: Feedback, plan: Plan, *rest: Any) -> None:
        plans.append(plan)
        original(self, plan, *rest)

    monkeypatch.setattr(Feedback, "on_plan_run", noted)
    run = trainer(tight(net.double(), "disk"), max_steps=STEPS, max_epochs=-1, precision="64-true")
    patches = [{"bag": bag["bag"][:1]} for bag in map(Bags().__getitem__, range(STEPS))]
    run.fit(Module(net, "SGD", lr=1e-2), DataLoader(patches, batch_size=None))
    assert all(is_untiled(plan) and plan.on_disk for plan in plans)
    assert len(plans) == STEPS
