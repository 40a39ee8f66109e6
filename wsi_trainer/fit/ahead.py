"""When the next slide's first tiles are read: while this one runs backward, in what the budget has left."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from lightning_plugin import SFTDDPStrategy, SFTStrategy
from wsi_trainer.data.ahead import LIMIT
from wsi_trainer.data.loader import TrainLoader


class ReadAhead(Callback):
    """Has the loader read ahead, step by step.

    Where processors compute, pixels lie in the memory that the budget is of. A plan has room for the next tile of its
    own slide only, so those of the next slide take no more than the budget has left beside the plan's peak (and what
    the first step held beside its own), and beside the most that any step has held. The first step of a run is only
    looked at. With a GPU pixels wait in the host's memory, and `LIMIT` bounds them.
    """

    def __init__(self) -> None:
        self._beside: int | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        loader = trainer.train_dataloader
        if isinstance(loader, TrainLoader):
            loader.read_ahead(self._room(trainer.strategy))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) or strategy.plan is None:
            return
        if self._beside is None:
            self._beside = max(0, strategy.peak_bytes - strategy.plan.peak_bytes)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader = trainer.train_dataloader
        if isinstance(loader, TrainLoader):
            loader.let_go()

    def _room(self, strategy: Any) -> int:
        if not isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) or strategy.plan is None:
            return 0
        if strategy.root_device.type != "cpu":
            return LIMIT
        budget = strategy.plan.budget
        if budget is None or self._beside is None:
            return 0
        return min(LIMIT, budget - max(strategy.plan.peak_bytes + self._beside, strategy.peak_bytes))
