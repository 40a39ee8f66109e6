"""One run: train, keep the best checkpoint, predict the held-out slides, and write down everything."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from wsi_trainer.data import (
    DataConfig,
    SlideData,
    SlideDataset,
    check_files,
    in_order,
    read_manifest,
    write_manifest,
)
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.engine import image_of, make_trainer
from wsi_trainer.fit.environment import environment
from wsi_trainer.fit.evaluate import evaluate, predict
from wsi_trainer.fit.facts import memory_facts
from wsi_trainer.fit.memory_watch import MemoryWatch
from wsi_trainer.fit.quiet import logged_to
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
    watch = MemoryWatch()
    callbacks = [watch, *_callbacks(config, folder, progress)]
    with logged_to(folder.log):
        trainer = make_trainer(config, folder.path, callbacks, _loggers(folder), progress)
        checkpoint = folder.checkpoint(resume) if resume else None
        trainer.fit(model, datamodule=slides, ckpt_path=checkpoint, weights_only=False)
    if watch.plan is not None:
        folder.plan.write_text(watch.plan.to_json() + "\n", encoding="utf-8")
    write_json(folder.memory, memory_facts(watch, model, slides, config))


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
    load_weights(model, folder.checkpoint(checkpoint))
    with logged_to(folder.log):
        predictions = predict(evaluator(config, folder, progress), model, make_data(model, data, config), split)
    predictions.write(folder.predictions(split))
    scores = {"split": split, "checkpoint": checkpoint, **evaluate(predictions)}
    write_json(folder.evaluation(split), scores)
    return scores


def predict_slides(
    model: SlideClassifier,
    data: DataConfig,
    config: TrainConfig,
    folder: RunFolder,
    manifest: Path,
    checkpoint: str = "best",
    progress: bool = True,
) -> Path:
    """Write the probabilities of slides that need no label; returns the path of the CSV file."""
    load_weights(model, folder.checkpoint(checkpoint))
    records = read_manifest(manifest, data.root, labelled=False)
    check_files(records)
    dataset = SlideDataset(records, None, data.downsample, partial(image_of, config))
    with logged_to(folder.log):
        outputs = evaluator(config, folder, progress).predict(model, dataloaders=in_order(dataset, data.workers))
    assert outputs is not None
    target = folder.path / "predictions" / f"{manifest.stem}.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "patient", *(f"probability_{name}" for name in model.task.classes)])
        for record, output in zip(records, outputs, strict=True):
            writer.writerow([record.slide, record.patient, *(float(value) for value in output[0])])  # type: ignore[index]
    return target


def evaluator(config: TrainConfig, folder: RunFolder, progress: bool) -> pl.Trainer:
    """A Trainer that only predicts."""
    bars: list[Callback] = [RichProgressBar(leave=False)] if progress else []
    return make_trainer(config, folder.path, bars, progress=progress)


def load_weights(model: SlideClassifier, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into the model."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    model.load_state_dict(state["state_dict"])


def make_data(model: SlideClassifier, data: DataConfig, config: TrainConfig) -> SlideData:
    """The slides as the run's engine wants them."""
    return SlideData(data, model.task.classes, config.seed, partial(image_of, config))


def _callbacks(config: TrainConfig, folder: RunFolder, progress: bool) -> list[Callback]:
    mode = "max" if config.monitor == "val_auc" else "min"
    keep: dict[str, Any] = {"dirpath": folder.checkpoints, "enable_version_counter": False}
    callbacks: list[Callback] = [
        ModelCheckpoint(filename="best", monitor=config.monitor, mode=mode, **keep),
        ModelCheckpoint(filename="last", **keep),  # save_last would write it only when there is a new best
    ]
    if config.patience is not None:
        callbacks.append(EarlyStopping(config.monitor, mode=mode, patience=config.patience))
    if progress:
        callbacks.append(RichProgressBar(leave=False))
    return callbacks


def _loggers(folder: RunFolder) -> list[Logger]:
    return [
        CSVLogger(folder.path, name=folder.metrics.name),  # a resumed run writes a further version_N
        TensorBoardLogger(folder.path, name="", version="tensorboard"),
    ]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)
