"""The strategies and their names are there whichever is imported first, and Lightning is whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_registered(tmp_path: Path) -> None:
    """Before anything of Lightning was imported, by an attribute of the package."""
    code = """
import lightning_plugin
lightning_plugin.SFTStrategy
import pytorch_lightning as pl
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False)
for name in ("sft", "SFT"):
    print(type(pl.Trainer(strategy=name, **options).strategy).__name__)
"""
    assert python(code, tmp_path).split() == ["SFTStrategy", "SFTStrategy"]


def test_without_lightning_the_engine_works_and_the_strategy_says_what_is_missing(tmp_path: Path) -> None:
    code = """
import sys
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("lightning", "pytorch_lightning") else found(name, *a)
import lightning_plugin, torch
tiled = lightning_plugin.TiledModule(torch.nn.Conv2d(3, 2, 3), tiles=2)
print(tuple(tiled(torch.ones(1, 3, 9, 9)).shape))
try:
    lightning_plugin.SFTStrategy
except ImportError as error:
    print(error)
"""
    out = python(code, tmp_path)
    assert "(1, 2, 7, 7)" in out and "pip install pytorch-lightning" in out


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="the package lightning is not installed")
def test_the_other_lightning(tmp_path: Path) -> None:
    code = """
import lightning.pytorch as pl
import lightning_plugin.strategy
strategy = pl.Trainer(strategy="sft", accelerator="cpu", logger=False, enable_checkpointing=False).strategy
print(isinstance(strategy, pl.strategies.Strategy), isinstance(strategy, lightning_plugin.SFTStrategy))
"""
    assert python(code, tmp_path).split() == ["True", "True"]
