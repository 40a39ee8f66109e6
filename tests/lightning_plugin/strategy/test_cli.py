"""LightningCLI: the constructor's typed arguments are options, on the command line and in YAML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI

from lightning_plugin import SFTStrategy
from tests.lightning_plugin.strategy.modules import Slides, loader

SMALL = [
    "--trainer.accelerator=cpu",
    "--trainer.precision=64-true",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]

YAML = """
trainer:
  strategy:
    class_path: lightning_plugin.SFTStrategy
    init_args:
      tiles: [3, 2]
      backward_tiles: 2
      disk: false
  max_steps: 1
"""


class Data(pl.LightningDataModule):
    def train_dataloader(self):  # type: ignore[no-untyped-def]
        return loader(2)


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str, run: bool = True) -> LightningCLI:
    command = ["fit"] if run else []
    monkeypatch.setattr(sys, "argv", ["train.py", *command, *SMALL, *arguments])
    return LightningCLI(Slides, Data, run=run, save_config_callback=None)


def test_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli(monkeypatch, "--trainer.strategy=sft", run=False)
    assert isinstance(found.trainer.strategy, SFTStrategy)


def test_a_class_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli(
        monkeypatch, "--trainer.strategy=lightning_plugin.SFTStrategy", "--trainer.strategy.budget=8GiB", run=False
    )
    assert found.trainer.strategy.engine.options.budget == 8 * 2**30


@pytest.mark.slow
def test_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML)
    found = cli(monkeypatch, "--config", str(file))
    engine = found.trainer.strategy.engine
    assert (engine.options.tiles, engine.options.backward_tiles, engine.options.disk) == ((3, 2), (2,), False)
    assert found.trainer.global_step == 1 and engine.plan is not None


def test_a_wrong_argument_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(monkeypatch, "--trainer.strategy=lightning_plugin.SFTStrategy", "--trainer.strategy.bugdet=8GiB", run=False)
    assert "bugdet" in capsys.readouterr().err


def test_the_help_says_what_options_mean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("SFTStrategy", "SFTDDPStrategy"):
        with pytest.raises(SystemExit):
            cli(monkeypatch, f"--trainer.strategy.help=lightning_plugin.{name}", run=False)
        said = " ".join(capsys.readouterr().out.split())
        assert "--trainer.strategy.budget" in said and "Device memory that a step may use" in said, said
        assert "--trainer.strategy.tile_over" in said and "--trainer.strategy.trim" in said
