"""How a run trains: the keys under `train` in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wsi_trainer.errors import UserError

Monitor = Literal["val_auc", "val_loss"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how fast, and within which memory."""

    epochs: int = 10
    """Times that each slide is seen."""
    accumulate: int = 1
    """Slides whose gradients are averaged for one step of the optimizer."""
    clip: float = 1.0
    """Largest norm of the gradient of a step; 0 does not clip."""
    seed: int = 0
    """Decides initial weights, splits left open, order and orientations."""
    budget: str | None = None
    """Device memory for a step, as "512MiB" or "8GiB", by tile-by-tile execution; without it plain PyTorch
    is used.
    """
    precision: str = "32-true"
    """Precision of the Trainer: 32-true, bf16-mixed, 64-true, ..."""
    accelerator: str = "auto"
    """Device of the Trainer: auto, cpu, cuda."""
    monitor: Monitor = "val_loss"
    """Which number of the validation slides chooses the best checkpoint."""
    patience: int | None = None
    """Stop after this many epochs without a better `monitor`; without it all epochs run."""

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must be 1 or more")
        if self.clip < 0:
            raise UserError(f"train.clip is {self.clip}; it must be 0 (off) or positive")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"train.patience is {self.patience}; it must be 1 or more, or null for none")
