"""What a checkpoint needs beyond Lightning's own, so that a killed run loses little and continues the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback


class StepCheckpoint(Callback):
    """Writes last.ckpt every so many steps of the optimizer, also in the middle of an epoch.

    Only where no gradient waits to be accumulated, since a checkpoint has none, and not after the last slide of an
    epoch: the one that follows validation would have to be taken for one before it.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every
        self._written = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        step = trainer.global_step
        due = self.every and step != self._written and step % self.every == 0
        if due and not loop._should_accumulate() and not loop.batch_progress.is_last_batch:
            self._written = step
            trainer.save_checkpoint(self.path)


class RandomState(Callback):
    """Keeps the state of PyTorch's generators, from which dropout draws. The tiled strategies do so themselves."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loaded is None:
            return
        torch.set_rng_state(self._loaded["cpu"].cpu())
        if len(self._loaded["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in self._loaded["cuda"]])
        self._loaded = None
