"""Train the same module under two strategies and compare everything that came of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_plugin import SFTStrategy
from tests.exactness import TOLERANCE, difference

TILES = {"tiles": (3, 2), "backward_tiles": (2, 3)}


def trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))


def fit(
    module: pl.LightningModule,
    data: Any,
    strategy: Any = "auto",
    val: Any = None,
    seed: int = 3,
    **options: Any,
) -> pl.Trainer:
    torch.manual_seed(seed)
    checkpoint = options.pop("ckpt_path", None)
    run = trainer(strategy, **({"max_steps": 4} | options))
    run.fit(module, data, val, ckpt_path=checkpoint)
    return run


def fit_both(make: Any, data: Any, val: Any = None, tiles: Any = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """(module, trainer) under the default strategy and under this one."""
    torch.manual_seed(0)
    plain = make()
    tiled = copy.deepcopy(plain)
    callbacks = options.pop("callbacks", list)
    first = fit(plain, data, "auto", val, callbacks=callbacks(), **options)
    strategy = SFTStrategy(**(tiles or TILES))
    second = fit(tiled, data, strategy, val, callbacks=callbacks(), **options)
    assert strategy.plan is not None, "nothing was tiled"
    return plain, first, tiled, second


def assert_same(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Weights, buffers and noted losses agree."""
    wrong = {n: e for n, e in differences(actual, expected).items() if not e < tolerance}
    assert not wrong, f"the strategies differ: {wrong}"


def differences(actual: nn.Module, expected: nn.Module) -> dict[str, float]:
    mine, other = state(actual), state(expected)
    assert mine.keys() == other.keys()
    largest = max(t.abs().max().item() for t in other.values() if t.numel())
    return {n: difference(mine[n], other[n], 1e-3 * largest) for n in other}


def state(module: nn.Module) -> dict[str, Tensor]:
    noted = {f"loss {i}": loss.detach() for i, loss in enumerate(getattr(module, "losses", []))}
    return {**{k: v.detach() for k, v in module.state_dict().items()}, **noted}


def last_checkpoint(folder: Path) -> Path:
    return sorted(folder.glob("*.ckpt"))[-1]
