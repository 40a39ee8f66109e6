"""Options of the Trainer that reach into a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn

from lightning_plugin import SFTStrategy
from tests.lightning_plugin.strategy.modules import Slides, loader
from tests.lightning_plugin.strategy.training import TILES, assert_same, fit, fit_both, trainer


@pytest.mark.slow
@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_profilers(tmp_path: Path, profiler: Any) -> None:
    rows = {"row_limit": 500} if profiler is PyTorchProfiler else {}  # by default the twenty that take longest
    steps = 2 if profiler is PyTorchProfiler else 1  # it records the second
    found = profiler(dirpath=tmp_path, filename="profile", **rows)
    fit(Slides(), loader(4), SFTStrategy(**TILES), max_steps=steps, profiler=found)
    text = next(tmp_path.glob("*profile*.txt")).read_text()
    assert "[Strategy]SFTStrategy.training_step" in text
    assert "[Strategy]SFTStrategy.backward" in text
    if profiler is PyTorchProfiler:
        assert "convolution" in text, "tiles are seen as the operators they are"


class Broken(Slides):
    """A square root of zero makes a gradient that is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["image"]).mul(0).sqrt().sum()


def test_anomalies_are_detected() -> None:
    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(Broken(), loader(2), SFTStrategy(**TILES), max_steps=1, detect_anomaly=True)


@pytest.mark.slow
def test_detecting_anomalies_changes_nothing() -> None:
    plain, _, tiled, _ = fit_both(Slides, loader(2), max_steps=1, detect_anomaly=True)
    assert_same(tiled, plain)


def test_fast_dev_run() -> None:
    module = Slides()
    run = trainer(SFTStrategy(**TILES), fast_dev_run=True)
    run.fit(module, loader(8), loader(8))
    assert run.global_step == 1 and run.strategy.plan is not None
    assert len(module.losses) == 1


def test_logged_values_are_numbers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Slides(), loader(8), SFTStrategy(**TILES), max_epochs=1, logger=logger, log_every_n_steps=1)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"train_loss_step", "train_loss_epoch", "train_accuracy_epoch", "confidence"} <= set(rows[0].split(","))
    assert len(rows) == 6


def test_gradients_can_be_tracked(tmp_path: Path) -> None:
    """Hooks between backward and the step see each parameter's gradient once."""
    seen: list[int] = []

    class Tracking(Slides):
        def on_fit_start(self) -> None:
            for p in self.parameters():
                p.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert all(p.grad is not None for p in self.parameters())

    module = Tracking()
    fit(module, loader(2), SFTStrategy(**TILES), max_steps=1)
    assert sorted(seen) == sorted(id(p) for p in module.parameters())


class Compiled(Slides):
    """Compiles its own backbone; an uncompiled twin computes what is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend=refuse)


def refuse(module: nn.Module, example: Any) -> Any:
    raise AssertionError("a recorded module was compiled")


@pytest.mark.slow
def test_compiled_modules_are_recorded_uncompiled() -> None:
    torch.manual_seed(0)
    plain = Slides()
    torch.manual_seed(0)
    compiled = Compiled()
    fit(plain, loader(4), "auto", max_steps=2)
    fit(compiled, loader(4), SFTStrategy(**TILES), max_steps=2)
    for name, parameter in plain.net.named_parameters():
        other = compiled.net._orig_mod.get_parameter(name)
        assert torch.allclose(other, parameter, rtol=1e-9, atol=1e-12), name


def test_a_compiled_lightning_module() -> None:
    torch.manual_seed(0)
    plain = Slides()
    torch.manual_seed(0)
    module = Slides()
    fit(plain, loader(4), "auto", max_steps=2)
    fit(torch.compile(module, backend=refuse), loader(4), SFTStrategy(**TILES), max_steps=2)
    assert_same(module, plain)


def test_checkpoints_of_the_best_epoch(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_loss", filename="best")
    run = fit(
        Slides(), loader(2), SFTStrategy(**TILES), val=loader(2), max_epochs=2, max_steps=-1,
        callbacks=[best], enable_checkpointing=True,
    )  # fmt: skip
    found = run.validate(dataloaders=loader(2), ckpt_path="best", verbose=False)
    assert found[0]["val_loss"] == pytest.approx(best.best_model_score.item(), rel=1e-6)


def test_one_device_only() -> None:
    with pytest.raises(ValueError, match="sft_ddp"):
        trainer(SFTStrategy(**TILES), devices=2)


def test_tiles_or_a_budget() -> None:
    with pytest.raises(ValueError, match="not both"):
        SFTStrategy(budget="1GiB", tiles=2)
