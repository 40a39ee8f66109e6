"""The steps of a run, in its structured log, and a word where a loss is not a finite number."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from lightning_plugin import SFTDDPStrategy, SFTStrategy
from wsi_trainer.fit.events import EventLog
from wsi_trainer.models import SlideBatch
from wsi_trainer.words import clean

EVERY = 5.0
"""Seconds between two steps that are written down."""
NAMED = 5
"""Losses that are not finite and are named; more of them say nothing new."""

log = logging.getLogger("wsi_trainer")


class Events(Callback):
    """Writes steps at a bounded rate, epochs with their scores, checkpoints, and losses that are not finite."""

    def __init__(self, events: EventLog, every: float = EVERY) -> None:
        self.events, self.every = events, every
        self._written = float("-inf")
        self._named = 0
        self._process = psutil.Process()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = int(trainer.num_training_batches)
        self.events.write("train", epochs=trainer.max_epochs, batches=self._batches, done=self._done(trainer))

    def _done(self, trainer: pl.Trainer) -> int:
        """Batches behind: of whole epochs, and of the one under way."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        within = progress.current.completed if progress.current.completed < self._batches else 0
        return trainer.current_epoch * self._batches + within

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: SlideBatch, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else None
        if value is not None and not math.isfinite(value):
            self._not_finite(trainer, batch, batch_idx, value)
        if time.monotonic() - self._written < self.every:
            return
        self._written = time.monotonic()
        strategy = trainer.strategy
        tiled = isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) and strategy.plan is not None
        self.events.write(
            "step",
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            done=trainer.current_epoch * self._batches + batch_idx + 1,
            slide=batch["slide"],
            loss=value,
            memory=self._process.memory_info().rss,
            device_memory=strategy.peak_bytes if tiled else None,  # type: ignore[attr-defined]
        )

    def _not_finite(self, trainer: pl.Trainer, batch: SlideBatch, batch_idx: int, value: float) -> None:
        self._named += 1
        if self._named > NAMED:
            return
        where = f"epoch {trainer.current_epoch}, batch {batch_idx}, step {trainer.global_step}"
        strategy = trainer.strategy
        lost = strategy.lost if isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) and self._named == 1 else None
        first = None if lost is None else str(lost)
        self.events.write("loss", step=trainer.global_step, slide=batch["slide"], loss=value, first=first)
        log.warning(
            "the loss of slide %s is %s (%s): as in plain PyTorch the run goes on, with weights that may be lost; a "
            "lower model.learning_rate or float32 may help%s",
            clean(batch["slide"]), value, where, "; further ones are not named" if self._named == NAMED else "",
        )  # fmt: skip

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
        epoch, done = trainer.current_epoch, (trainer.current_epoch + 1) * self._batches
        self.events.write("epoch", epoch=epoch, step=trainer.global_step, done=done, scores=scores)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self.events.write("checkpoint", step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.events.write("trained", step=trainer.global_step)
