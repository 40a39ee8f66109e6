"""Watching what the steps of a run need."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from lightning_plugin import Plan, SFTDDPStrategy, SFTStrategy
from wsi_trainer.models import SlideBatch


class MemoryWatch(Callback):
    """Counts training steps, and keeps the largest measured peak and the plan of the step that needed most."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_peak_bytes = 0
        self.plan: Plan | None = None
        self.image_shape: tuple[int, ...] = ()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: SlideBatch,
        batch_idx: int,
    ) -> None:
        self.steps += 1
        strategy = trainer.strategy
        if not isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) or strategy.plan is None:
            return
        self.step_peak_bytes = max(self.step_peak_bytes, strategy.peak_bytes)
        if self.plan is None or strategy.plan.plain_bytes > self.plan.plain_bytes:
            self.plan = strategy.plan
            self.image_shape = tuple(batch["image"].shape)
