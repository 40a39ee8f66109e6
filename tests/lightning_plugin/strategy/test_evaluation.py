"""Validation, test and prediction: forward only, in inference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_plugin import Box, LazyImage, SFTStrategy, TileSource
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Each, Pictures, Slides, loader
from tests.lightning_plugin.strategy.training import TILES, fit_both, trainer


class Counting(TileSource):
    """A source that counts how often each pixel is read."""

    def __init__(self, image: Tensor) -> None:
        self.image = image[None]
        self.reads = torch.zeros(image.shape[1:], dtype=torch.int64)

    shape = property(lambda self: tuple(self.image.shape))
    dtype = property(lambda self: self.image.dtype)

    def read(self, box: Box) -> Tensor:
        part = (slice(box.lo[0], box.hi[0]), slice(box.lo[1], box.hi[1]))
        self.reads[part] += 1
        return self.image[(..., *part)]

    def constant(self, box: Box) -> None:
        return None


class Tested(Slides):
    """Tests with a metric of its own; the grad mode of its steps is noted."""

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inference = torch.is_inference_mode_enabled()
        logits = self.net(batch["image"])
        self.log("test_loss", nn.functional.cross_entropy(logits, batch["label"]))
        return logits


def test_validation_while_fitting() -> None:
    _, first, _, second = fit_both(Slides, loader(4), val=loader(6), max_epochs=2, max_steps=-1)
    assert first.callback_metrics["val_loss"] > 0
    assert difference(second.callback_metrics["val_loss"], first.callback_metrics["val_loss"]) < 1e-9


@pytest.mark.parametrize("inference_mode", [True, False])
def test_testing(inference_mode: bool) -> None:
    module = Tested().double()
    expected = trainer(inference_mode=inference_mode).test(module, loader(6), verbose=False)
    actual = trainer(SFTStrategy(**TILES), inference_mode=inference_mode).test(module, loader(6), verbose=False)
    assert module.inference is inference_mode
    assert actual[0]["test_loss"] == pytest.approx(expected[0]["test_loss"], rel=1e-6)  # logged in single precision


def test_prediction_returns_ordinary_tensors() -> None:
    module = Slides().double()
    expected = trainer().predict(module, loader(5))
    actual = trainer(SFTStrategy(**TILES)).predict(module, loader(5))
    for a, e in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        assert difference(a, e) < 1e-9


def test_predicted_maps_are_tensors_too() -> None:
    class Maps(Slides):
        def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"map": self.net.blocks(self.net.stem(batch["image"])), "names": ["a", "b"]}

    module = Maps().double()
    expected = trainer().predict(module, loader(2))
    actual = trainer(SFTStrategy(**TILES)).predict(module, loader(2))
    assert type(actual[0]["map"]) is Tensor and actual[0]["names"] == ["a", "b"]
    assert difference(actual[0]["map"], expected[0]["map"]) < 1e-9


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
def test_dense_batches_are_evaluated_within_the_budget(evaluate: str) -> None:
    module, data = Tested().double(), DataLoader(Pictures(2, (128, 160)))
    module.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    expected = getattr(trainer(), evaluate)(module, data)
    strategy = SFTStrategy(budget="400KiB", tile_over=1)
    actual = getattr(trainer(strategy), evaluate)(module, data)
    assert strategy.plan is not None and any(s.forward.tiles > 1 for s in strategy.plan.segments)
    assert strategy.plan is not None and strategy.plan.barriers == () and strategy.peak_bytes <= 400 * 1024
    for a, e in zip(actual, expected, strict=True):
        if evaluate == "predict":
            assert difference(a, e) < 1e-9
        else:
            assert a == pytest.approx(e, rel=1e-6)  # logged in single precision


def test_evaluation_recomputes_nothing() -> None:
    """In eval mode nothing waits for a statistic: with one tile and no grad every pixel is read once."""
    sources = [Counting(image) for image in Pictures(2).images]
    data = Each(*({"image": LazyImage(s), "label": torch.tensor([1])} for s in sources))
    trainer(SFTStrategy(tiles=(1, 1))).validate(Slides().double(), data, verbose=False)
    assert all(bool((s.reads == 1).all()) for s in sources)


def test_training_after_validation_needs_gradients_again() -> None:
    """A plan for evaluation must not be taken for training, nor the other way round."""
    strategy = SFTStrategy(budget="1GiB", tile_over=1)
    run = trainer(strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    run.fit(Slides(), loader(2), loader(2))
    assert len(strategy.engine.planner.plans) == 2
