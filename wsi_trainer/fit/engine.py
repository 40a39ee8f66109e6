"""How a step is executed: by plain PyTorch, or tile by tile within a budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import Tensor

from lightning_plugin import SFTDDPStrategy, SFTStrategy, TileSource
from wsi_trainer.data import dense
from wsi_trainer.errors import UserError
from wsi_trainer.fit.checkpoints import Checkpoints
from wsi_trainer.fit.config import AUTO, TrainConfig


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
    devices: int = 1,
) -> pl.Trainer:
    """A Trainer with the strategy that the budget asks for."""
    options: dict[str, Any] = {}
    if config.budget is not None:
        budget = None if config.budget == AUTO else config.budget
        try:
            strategy = SFTStrategy if devices == 1 else SFTDDPStrategy
            options["strategy"] = strategy(
                budget=budget, halo=config.halo, splits=config.splits, split_depth=config.split_depth,
                wobble=config.wobble, compile=config.compile, trim=config.trim,
            )  # fmt: skip
        except (ValueError, OverflowError) as error:
            raise UserError(f"train.budget: {error}") from error
        options["inference_mode"] = False  # tiles are computed by autograd functions, which refuse its tensors
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            devices=devices,
            precision=precision_of(config),  # type: ignore[arg-type]
            max_epochs=config.epochs,
            accumulate_grad_batches=config.accumulate,
            gradient_clip_val=config.clip or None,
            default_root_dir=os.fspath(folder),
            callbacks=callbacks,
            plugins=[Checkpoints()],
            logger=loggers or False,
            enable_progress_bar=progress,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            use_distributed_sampler=False,  # the loaders give each rank its share themselves
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            **options,
        )
    except (ValueError, MisconfigurationException) as error:  # of accelerator, devices and precision: Lightning's own
        raise UserError(f"train: {' '.join(str(error).split())}") from error


def precision_of(config: TrainConfig) -> str:
    """The Trainer's precision."""
    if config.precision != AUTO:
        return config.precision
    gpu = config.accelerator in (AUTO, "cuda", "gpu") and torch.cuda.is_available()
    return "bf16-mixed" if gpu and torch.cuda.is_bf16_supported() else "32-true"
