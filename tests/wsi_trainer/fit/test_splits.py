"""Splits in a config: what is refused, what the strategy is given, and what the report says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_plugin import SFTStrategy
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.plan import plan
from wsi_trainer.fit.trainer import make_trainer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"halo": "split"}, "train.split_grid is None; give split_grid"),
        ({"split_grid": 2}, "train.halo is auto and train.split_grid is 2"),
        ({"halo": "split", "split_grid": 1}, "it must be 2 or more"),
        ({"halo": "split", "split_grid": 2, "split_depth": 1.5}, "train.split_depth is 1.5"),
        ({"halo": "stochastic_split", "split_grid": 2, "split_jitter": 0.5}, "train.split_jitter is 0.5"),
        ({"halo": "split", "split_grid": 2, "budget": None}, "give train.budget"),
        ({"compile": "tiles", "budget": None}, "train.compile is tiles, which needs tile-by-tile execution"),
    ],
)
def test_what_is_wrong_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(**words)


def test_the_strategy_is_given_what_the_config_says(tmp_path: Path) -> None:
    config = TrainConfig(
        halo="stochastic_split",
        split_grid=3,
        split_depth="layer2",
        split_jitter=0.1,
        budget="1GiB",
        accelerator="cpu",
        compile="tiles",
    )
    strategy = make_trainer(config, tmp_path, progress=False).strategy
    assert isinstance(strategy, SFTStrategy)
    found = strategy.engine.options.splitting
    assert strategy.engine.options.compile == "tiles"
    assert found is not None and (found.counts, found.depth, found.wobble) == ((3,), "layer2", 0.1)


def test_a_plan_of_the_command_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "ResNet", "--image", "512x512", "--budget", "300MiB", "--halo", "split", "--splits", "2"]
    assert plan(words) == 0
    assert "an approximation in training: splits 2 along each axis up to 50 %" in capsys.readouterr().out
