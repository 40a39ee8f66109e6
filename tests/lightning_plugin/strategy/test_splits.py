"""A strategy says before a fit, in its log and in its checkpoints that a training is an approximation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_plugin import SFTStrategy
from tests.lightning_plugin.strategy.modules import Slides, loader
from tests.lightning_plugin.strategy.training import TILES, fit, last_checkpoint

SPLIT: dict[str, Any] = {**TILES, "splits": 2, "split_depth": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("halo", ["split", "stochastic_split"])
def test_a_run_says_what_it_approximates(halo: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = SFTStrategy(halo=halo, **SPLIT)
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    with caplog.at_level(logging.INFO, "lightning_plugin"):
        fit(Slides(), loader(4), strategy, loader(2), max_steps=4, callbacks=[keep], enable_checkpointing=True)
    assert "training is an approximation: splits 2 along each axis" in caplog.text
    assert caplog.text.count("an approximation in training: splits 2") == 1  # the plan, told once
    saved = torch.load(last_checkpoint(tmp_path), weights_only=True)["lightning_plugin"]
    assert saved["approximation"] == strategy.engine.options.approximation
    if halo == "stochastic_split":
        assert not any("an approximation" in text for plans in saved["plans"].values() for text in plans)


def test_going_on_otherwise_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    fit(Slides(), loader(2), SFTStrategy(**TILES), max_steps=2, callbacks=[keep], enable_checkpointing=True)
    with caplog.at_level(logging.WARNING, "lightning_plugin"):
        fit(Slides(), loader(2), SFTStrategy(halo="split", **SPLIT), max_steps=3, ckpt_path=last_checkpoint(tmp_path))
    assert "was trained exactly, and the run goes on with splits 2" in caplog.text
