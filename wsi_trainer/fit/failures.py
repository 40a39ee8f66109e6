"""Slides that could not be read while the run went on without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from wsi_trainer.errors import UserError
from wsi_trainer.models import SlideBatch, SlideClassifier
from wsi_trainer.tables import append_row
from wsi_trainer.words import clean

log = logging.getLogger("wsi_trainer")
COLUMNS = ("slide", "stage", "epoch", "reason")


class FailureLog(Callback):
    """Writes each to failures.csv and says so at once; ends the run where nothing is left to train on.

    A slide left out of a step counts there as a slide without gradient: the others keep the weight that they would
    have had with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slides: list[str] = []
        """Of this process, in order; a slide that fails in two epochs is there twice."""
        self._epoch = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, SlideClassifier)
        pl_module.on_failure = self.note
        self._trainer = trainer

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, SlideClassifier)
        pl_module.on_failure = None

    def note(self, batch: SlideBatch, reason: str) -> None:
        """A slide of this batch is left out."""
        stage = str(self._trainer.state.stage.value) if self._trainer.state.stage else "predict"
        self.slides.append(batch["slide"])
        self._epoch += stage == "train"
        append_row(self.path, COLUMNS, [batch["slide"], stage, self._trainer.current_epoch, reason])
        log.warning("slide %s is left out (%s): %s", clean(batch["slide"]), stage, clean(reason))

    def on_train_epoch_start(self, *args: Any) -> None:
        self._epoch = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch and self._epoch >= trainer.num_training_batches:
            raise UserError(f"none of the {self._epoch} training slides can be read; the reasons are in {self.path}")
