"""Watching what the steps of a run need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from lightning_plugin import Plan, SFTDDPStrategy, SFTStrategy
from wsi_trainer.models import SlideBatch
from wsi_trainer.slides.store.files import replace_file


class MemoryWatch(Callback):
    """Counts training steps, and keeps the largest measured peak and the plan of the step that needed most.

    Checkpoints hold what it knows: a run that ends after its last one tells of all of its steps when it is continued.

    Args:
        file: Where that plan is written, while the run goes on: one that fails is asked for it, too.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.steps = 0
        self.step_peak_bytes = 0
        self.plan: Plan | None = None
        self.image_shape: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        plan = None if self.plan is None else self.plan.to_json()
        return {"step_peak_bytes": self.step_peak_bytes, "plan": plan, "image_shape": list(self.image_shape)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_peak_bytes = int(state_dict["step_peak_bytes"])
        self.plan = None if state_dict["plan"] is None else Plan.from_json(state_dict["plan"])
        self.image_shape = tuple(state_dict["image_shape"])

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
            self.write_plan()

    def write_plan(self) -> None:
        """Writes the plan down, where there is one and a place for it."""
        if self.file is not None and self.plan is not None:
            replace_file(self.file, (self.plan.to_json() + "\n").encode())
