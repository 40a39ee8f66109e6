"""How a step is executed: by plain PyTorch, or tile by tile within a budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import Tensor

from lightning_plugin import TileSource
from wsi_trainer.data import dense
from wsi_trainer.fit.config import TrainConfig


def image_of(config: TrainConfig, source: TileSource) -> Tensor:
    """The image of a batch: lazy where a budget is given, else read whole."""
    if config.budget is None:
        return dense(source)
    from lightning_plugin import LazyImage

    return LazyImage(source)


def make_trainer(
    config: TrainConfig,
    folder: Path,
    callbacks: list[Callback] | None = None,
    loggers: list[Logger] | None = None,
    progress: bool = True,
) -> pl.Trainer:
    """A Trainer with the strategy that the budget asks for."""
    options: dict[str, Any] = {}
    if config.budget is not None:
        from lightning_plugin import SFTStrategy

        options["strategy"] = SFTStrategy(budget=config.budget)
        options["inference_mode"] = False  # tiles are computed by autograd functions, which refuse its tensors
    return pl.Trainer(
        accelerator=config.accelerator,
        devices=1,
        precision=config.precision,  # type: ignore[arg-type]
        max_epochs=config.epochs,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.clip or None,
        default_root_dir=os.fspath(folder),
        callbacks=callbacks,
        logger=loggers or False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **options,
    )
