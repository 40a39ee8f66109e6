"""The strategies and their names are there whichever is imported first, and Lightning is whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.warm import forget, start

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


@pytest.mark.parametrize("imports", ORDERS)
def test_names_are_registered_in_any_order_of_imports(imports: str, tmp_path: Path) -> None:
    log, found = tmp_path / "log", tmp_path / "found"
    start(log, make_strategies, imports, found).join(120)
    assert found.is_file(), log.read_text()
    strategies = ["SFTStrategy", "SFTStrategy", "SFTDDPStrategy", "spawn"]
    whole = ["pytorch_lightning.callbacks", "pytorch_lightning.loggers", "pytorch_lightning.accelerators"]
    assert found.read_text().split() == strategies + whole


def make_strategies(imports: str, found: Path) -> None:
    """Import Lightning and the engine, neither of which is there, and write down what a Trainer makes of the names."""
    forget("lightning_plugin", "pytorch_lightning", "lightning_fabric")
    names: dict[str, Any] = {}
    exec(imports, names)
    pl = names["pl"]
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    strategies = [pl.Trainer(strategy=name, **options).strategy for name in ("sft", "SFT", "sft_ddp_spawn")]
    made = [f"{type(strategy).__name__} {getattr(strategy, '_start_method', '')}" for strategy in strategies]
    found.write_text(" ".join([*made, pl.callbacks.__name__, pl.loggers.__name__, pl.accelerators.__name__]))


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
    start(tmp_path / "log", step_without_lightning).join(120)
    out = (tmp_path / "log").read_text()
    assert "(1, 2, 7, 7)" in out and "pip install pytorch-lightning" in out


def step_without_lightning() -> None:
    forget("lightning_plugin", "pytorch_lightning", "lightning_fabric")
    there = importlib.util.find_spec
    absent = ("lightning", "pytorch_lightning")
    importlib.util.find_spec = lambda name, *more: None if name in absent else there(name, *more)
    import torch

    import lightning_plugin

    tiled = lightning_plugin.TiledModule(torch.nn.Conv2d(3, 2, 3), tiles=2)
    print(tuple(tiled(torch.ones(1, 3, 9, 9)).shape))
    try:
        lightning_plugin.SFTStrategy  # noqa: B018
    except ImportError as error:
        print(error)
    assert not [name for name in sys.modules if name.startswith(("pytorch_lightning", "lightning_fabric"))]


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="the package lightning is not installed")
def test_the_other_lightning(tmp_path: Path) -> None:
    code = """
import lightning.pytorch as pl
import lightning_plugin
strategy = pl.Trainer(strategy="sft", accelerator="cpu", logger=False, enable_checkpointing=False).strategy
print(isinstance(strategy, pl.strategies.Strategy), isinstance(strategy, lightning_plugin.SFTStrategy))
"""
    assert python(code, tmp_path).split() == ["True", "True"]
