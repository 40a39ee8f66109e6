"""What Lightning does between a loss and a step: clipping, accumulation, several optimizers, averaging, stopping."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from tests.lightning_plugin.strategy.modules import Slides, loader
from tests.lightning_plugin.strategy.training import assert_same, fit_both


@pytest.mark.parametrize(("value", "algorithm"), [(0.05, "norm"), (0.002, "value")])
def test_gradients_are_clipped(value: float, algorithm: str) -> None:
    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "max_steps": 2}
    plain, _, tiled, _ = fit_both(Slides, loader(), **options)
    assert_same(tiled, plain)
    largest = [p.grad.abs().max().item() for p in tiled.parameters()]
    total = sum(p.grad.square().sum().item() for p in tiled.parameters()) ** 0.5
    limit = max(largest) if algorithm == "value" else total
    assert limit == pytest.approx(value, rel=1e-6), "the clip did not bite"


def test_gradients_are_accumulated() -> None:
    plain, first, tiled, second = fit_both(Slides, loader(), accumulate_grad_batches=2, max_epochs=2, max_steps=6)
    assert first.global_step == second.global_step == 6
    assert_same(tiled, plain)


@pytest.mark.slow
def test_accumulation_can_be_scheduled() -> None:
    def callbacks() -> list:
        return [GradientAccumulationScheduler({0: 1, 1: 3})]

    plain, _, tiled, _ = fit_both(Slides, loader(), callbacks=callbacks, max_epochs=2, max_steps=-1)
    assert_same(tiled, plain)


class TwoNetworks(Slides):
    """Manual optimization: the body and the head have optimizers of their own, which take turns on one image."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        first = nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])
        self.toggle_optimizer(head)
        head.zero_grad()
        self.manual_backward(first)
        self.clip_gradients(head, 0.5, "norm")
        head.step()
        self.untoggle_optimizer(head)
        second = nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])
        body.zero_grad()
        second.backward()  # a step may also call it directly
        body.step()
        self.lr_schedulers().step()
        self.losses += [first.detach(), second.detach()]
        self.log_dict({"first": first, "second": second}, on_step=True)

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(self.net.blocks.parameters(), lr=0.01)
        head = torch.optim.SGD(self.net.head.parameters(), lr=0.1)
        return [body, head], [torch.optim.lr_scheduler.ExponentialLR(body, 0.9)]


def test_manual_optimization_with_two_optimizers() -> None:
    plain, first, tiled, second = fit_both(TwoNetworks, loader(6), max_epochs=1, max_steps=-1)
    assert first.global_step == second.global_step == 6
    assert_same(tiled, plain)


class Reconsidering(Slides):
    """LBFGS calls the step again and again."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.slow
def test_an_optimizer_may_call_the_step_several_times() -> None:
    plain, _, tiled, _ = fit_both(Reconsidering, loader(4), max_epochs=1, max_steps=-1)
    assert len(plain.losses) == len(tiled.losses) > 2
    assert_same(tiled, plain, 1e-7)  # LBFGS multiplies rounding by its curvature estimates


class Skipping(Slides):
    """Returns None from some steps, whose BatchNorm statistics count nevertheless."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_step_may_return_nothing() -> None:
    plain, _, tiled, _ = fit_both(Skipping, loader(8), max_epochs=1, max_steps=-1)
    assert_same(tiled, plain)


class Dictionary(Slides):
    """Returns more than a loss, and a callback reads it."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.net(batch["image"])
        self.seen: list[Tensor] = []
        return {"loss": nn.functional.cross_entropy(logits, batch["label"]), "logits": logits.detach(), "note": "x"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert type(outputs["loss"]) is Tensor and type(outputs["logits"]) is Tensor
        self.losses.append(outputs["logits"] + outputs["loss"])


def test_a_step_may_return_a_dictionary() -> None:
    plain, _, tiled, _ = fit_both(Dictionary, loader(4), max_epochs=1, max_steps=-1)
    assert_same(tiled, plain)


AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.8),
    "WeightAveraging": lambda: WeightAveraging(),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EMA", pytest.param("WeightAveraging", marks=pytest.mark.full), "SWA"])
def test_weights_are_averaged(name: str) -> None:
    """SWA runs an extra epoch of forward passes for the BatchNorm statistics of the average."""
    found = {}

    class Watch(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            average = next(c for c in trainer.callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging))
            found[len(found)] = average

    def callbacks() -> list:
        return [AVERAGES[name](), Watch()]

    plain, _, tiled, _ = fit_both(Slides, loader(4), val=loader(2), callbacks=callbacks, max_epochs=3, max_steps=-1)
    assert_same(tiled, plain)
    assert len(found) == 2


@pytest.mark.slow
def test_training_stops_early() -> None:
    def callbacks() -> list:
        return [EarlyStopping("val_loss", patience=1, min_delta=10.0), LearningRateMonitor("step")]

    plain, first, tiled, second = fit_both(
        Slides, loader(4), val=loader(2), callbacks=callbacks, max_epochs=6, max_steps=-1, logger=True
    )
    assert first.current_epoch == second.current_epoch < 6
    assert_same(tiled, plain)
