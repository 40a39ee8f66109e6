"""The strategies and their names are there whichever is imported first, and Lightning is whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.warm import start

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


ORDERS = [
    "import lightning_plugin; import pytorch_lightning as pl",
    "import pytorch_lightning as pl; import lightning_plugin",
    "from lightning_plugin import SFTStrategy; import pytorch_lightning as pl",
    "import lightning_plugin; from pytorch_lightning.callbacks import Callback; import pytorch_lightning as pl",
]


def test_names_are_registered_in_any_order_of_imports(tmp_path: Path) -> None:
    """Each order in a process of its own, forked from one that has imported what takes Lightning longest to import."""
    code = f"""
import os
import sys
import torchmetrics
assert not [name for name in sys.modules if name.startswith(("lightning_plugin", "lightning_fabric", "pytorch_l"))]
for imports in {ORDERS!r}:
    if not os.fork():
        exec(imports)
        options = dict(accelerator="cpu", logger=False, enable_checkpointing=False)
        for name in ("sft", "SFT", "sft_ddp_spawn"):
            strategy = pl.Trainer(strategy=name, **options).strategy
            print(type(strategy).__name__, getattr(strategy, "_start_method", ""))
        print(pl.callbacks.__name__, pl.loggers.__name__, pl.accelerators.__name__)
        sys.exit()
    assert os.wait()[1] == 0, imports
"""
    strategies = ["SFTStrategy", "SFTStrategy", "SFTDDPStrategy", "spawn"]
    whole = ["pytorch_lightning.callbacks", "pytorch_lightning.loggers", "pytorch_lightning.accelerators"]
    assert python(code, tmp_path).split() == len(ORDERS) * (strategies + whole)


def test_a_trainer_of_the_other_lightning_is_told_so(tmp_path: Path) -> None:
    """Its base class is not that of the strategies."""
    process = start(tmp_path / "log", register_for_the_other)
    process.join(120)
    assert "this Trainer is of lightning.pytorch, and the strategies" in (tmp_path / "log").read_text()


def register_for_the_other() -> None:
    from pytorch_lightning.strategies import StrategyRegistry

    from lightning_plugin.registration import register

    other = type("Strategy", (), {"__module__": "lightning.pytorch.strategies.strategy"})
    register(types.SimpleNamespace(StrategyRegistry=StrategyRegistry, Strategy=other))
    try:
        StrategyRegistry.get("sft")
    except TypeError as error:
        print(error)


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
import lightning_plugin
strategy = pl.Trainer(strategy="sft", accelerator="cpu", logger=False, enable_checkpointing=False).strategy
print(isinstance(strategy, pl.strategies.Strategy), isinstance(strategy, lightning_plugin.SFTStrategy))
"""
    assert python(code, tmp_path).split() == ["True", "True"]
