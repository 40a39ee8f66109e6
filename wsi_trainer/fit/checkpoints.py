"""What a checkpoint needs beyond Lightning's own, so that a killed run loses little and continues the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from lightning_plugin import WholeCheckpoints
from wsi_trainer.errors import UserError
from wsi_trainer.fit.memory import format_bytes
from wsi_trainer.models.weights import read_checkpoint


class Checkpoints(WholeCheckpoints):
    """Checkpoints that are written whole or not at all, without a second copy in memory, and read without running
    anything that they hold."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file under its name once it is safe on the disk."""
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            kept = "; the checkpoint before it is kept" if Path(path).is_file() else ""
            size = format_bytes(size_of(checkpoint))
            raise UserError(
                f"{path} cannot be written (about {size}): {error.strerror}{kept}; mend it and continue with "
                "--resume last"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """Read the file: tensors and plain values only."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file."""
        Path(path).unlink(missing_ok=True)


def size_of(checkpoint: dict[str, Any]) -> int:
    """The bytes of a checkpoint's tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(checkpoint)}.values())


def tensors_of(thing: Any) -> Iterator[Tensor]:
    """The tensors within dictionaries and lists."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (dict, list, tuple)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_of(part)


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
