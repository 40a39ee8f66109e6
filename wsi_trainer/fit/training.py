"""One run: train, keep the best checkpoint, predict the held-out slides, and write down everything."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from wsi_trainer.data import DataConfig, SlideData, write_manifest
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.engine import image_of, make_trainer
from wsi_trainer.fit.environment import environment
from wsi_trainer.fit.evaluate import evaluate, predict
from wsi_trainer.fit.facts import memory_facts
from wsi_trainer.fit.run_folder import RunFolder, write_json
from wsi_trainer.models import SlideClassifier


def train(
    model: SlideClassifier,
    data: DataConfig,
    config: TrainConfig,
    folder: RunFolder,
    resume: str | None = None,
    progress: bool = True,
) -> None:
    """Train the model; leaves config-independent files of the run in its folder.

    Args:
        model: The network, with the weights to start from.
        data: The slides.
        config: How long and within which memory.
        folder: Where everything goes.
        resume: A checkpoint to continue from: "last", or a path.
        progress: Whether to show a progress bar.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    slides = make_data(model, data, config)
    write_manifest(folder.splits, slides.records)
    write_json(folder.environment, environment())
    with log_file(folder.log):
        trainer = make_trainer(config, folder.path, _callbacks(config, folder, progress), _loggers(folder), progress)
        checkpoint = folder.checkpoint(resume) if resume else None
        trainer.fit(model, datamodule=slides, ckpt_path=checkpoint, weights_only=False)
    write_json(folder.memory, memory_facts(trainer, model, slides, config, folder))


def test(
    model: SlideClassifier,
    data: DataConfig,
    config: TrainConfig,
    folder: RunFolder,
    split: str = "test",
    checkpoint: str = "best",
    progress: bool = True,
) -> dict[str, object]:
    """Predict a split with a checkpoint of the run, and write predictions and scores."""
    state = torch.load(folder.checkpoint(checkpoint), map_location="cpu", weights_only=False)
    model.load_state_dict(state["state_dict"])
    bars: list[Callback] = [RichProgressBar(leave=False)] if progress else []
    trainer = make_trainer(config, folder.path, bars, progress=progress)
    predictions = predict(trainer, model, make_data(model, data, config), split)
    predictions.write(folder.predictions(split))
    scores = {"split": split, "checkpoint": checkpoint, **evaluate(predictions)}
    write_json(folder.evaluation(split), scores)
    return scores


def make_data(model: SlideClassifier, data: DataConfig, config: TrainConfig) -> SlideData:
    """The slides as the run's engine wants them."""
    return SlideData(data, model.task.classes, config.seed, partial(image_of, config))


def _callbacks(config: TrainConfig, folder: RunFolder, progress: bool) -> list[Callback]:
    mode = "max" if config.monitor == "val_auc" else "min"
    callbacks: list[Callback] = [
        ModelCheckpoint(
            dirpath=folder.checkpoints,
            filename="best",
            monitor=config.monitor,
            mode=mode,
            save_last=True,
            enable_version_counter=False,
        )
    ]
    if config.patience is not None:
        callbacks.append(EarlyStopping(config.monitor, mode=mode, patience=config.patience))
    if progress:
        callbacks.append(RichProgressBar(leave=False))
    return callbacks


def _loggers(folder: RunFolder) -> list[Logger]:
    return [
        CSVLogger(folder.path, name="", version=""),
        TensorBoardLogger(folder.path, name="", version="tensorboard"),
    ]


class log_file:
    """A context in which what Lightning and this package log also goes to a file."""

    def __init__(self, path: Path) -> None:
        self.handler = logging.FileHandler(path, encoding="utf-8")
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))

    def __enter__(self) -> None:
        for name in ("pytorch_lightning", "wsi_trainer", "lightning_plugin"):
            logging.getLogger(name).addHandler(self.handler)

    def __exit__(self, *error: object) -> None:
        for name in ("pytorch_lightning", "wsi_trainer", "lightning_plugin"):
            logging.getLogger(name).removeHandler(self.handler)
        self.handler.close()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)
