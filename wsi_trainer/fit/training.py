"""One run: train, keep the best checkpoint, predict the held-out slides, and write down everything."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from rich.console import Console
from torch.utils.data import DataLoader

from wsi_trainer.data import (
    DataConfig,
    SlideData,
    SlideDataset,
    SlideRecord,
    changes_since,
    check_files,
    pixels_of,
    read_manifest,
    read_splits,
    write_manifest,
)
from wsi_trainer.data.datamodule import grouped
from wsi_trainer.data.loader import in_order
from wsi_trainer.errors import UserError
from wsi_trainer.fit.ahead import ReadAhead
from wsi_trainer.fit.checkpoints import RandomState, StepCheckpoint
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.engine import image_of, make_trainer
from wsi_trainer.fit.environment import environment
from wsi_trainer.fit.estimate import Estimate
from wsi_trainer.fit.evaluate import evaluate, predict, read_predictions
from wsi_trainer.fit.facts import memory_facts
from wsi_trainer.fit.failures import FailureLog
from wsi_trainer.fit.memory_watch import MemoryWatch
from wsi_trainer.fit.quiet import logged_to
from wsi_trainer.fit.ranks import is_first
from wsi_trainer.fit.run_folder import RunFolder, write_json
from wsi_trainer.fit.trackers import check_trackers, trackers
from wsi_trainer.metrics import LOWER_IS_BETTER
from wsi_trainer.models import FrozenFeatures, PatchEncoder, SegmentationTask, SlideBatch, SlideClassifier, Task
from wsi_trainer.models.weights import read_checkpoint
from wsi_trainer.tables import write_table
from wsi_trainer.terminal import say

log = logging.getLogger("wsi_trainer")


def train(
    model: SlideClassifier,
    data: DataConfig,
    config: TrainConfig,
    folder: RunFolder,
    resume: str | None = None,
    progress: bool = True,
    watchers: Sequence[Callback] = (),
) -> bool:
    """Train the model; leaves config-independent files of the run in its folder.

    Args:
        model: The network, with the weights to start from.
        data: The slides.
        config: How long and within which memory.
        folder: Where everything goes.
        resume: A checkpoint to continue from: "last", or a path.
        progress: Whether to show a progress bar.
        watchers: Callbacks that only look on.

    Returns:
        Whether this process is the first of those that trained: it alone tests and writes.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    check_settings(model, data, config)
    slides = make_data(model, data, config, folder if resume is not None and folder.begun else None)
    if lack := model.task.lack(slides.targets_of("train")):
        raise UserError(f"the split train has {lack}: nothing can be learnt; look at the labels, or divide them anew")
    warn_of_lack(model, slides, "val")
    model.task.prepare(slides.targets_of("train"))
    if is_first():
        if slides.kept is None:
            write_manifest(folder.splits, slides.records)
        write_json(folder.environment, environment())
    checkpoint = None if resume is None else start_of(folder, resume)
    if isinstance(model.task, SegmentationTask) and model.task.weights.balanced and checkpoint is None:
        # What a checkpoint holds needs no counting.
        model.task.prepare_pixels(pixels_of(slides.of("train"), model.task, data, progress and is_first()))
    if checkpoint is None and (match := model.load_pretrained()):
        for line in str(match).splitlines():
            say(Console(), line)
        write_json(folder.pretrained, match.to_dict())
    watch, failures = MemoryWatch(folder.plan if is_first() else None), failure_log(data, folder)
    callbacks = [watch, *watchers, *failures, *_callbacks(config, model, slides, folder, progress)]
    with logged_to(folder.log), trackers(config, folder) as loggers:
        trainer = make_trainer(config, folder.path, callbacks, loggers, progress, devices=config.devices)
        trainer.fit(model, datamodule=slides, ckpt_path=checkpoint, weights_only=True)
    if not trainer.is_global_zero:
        return False
    if not watch.steps and (folder.memory.is_file() or (watch.plan is None and config.budget is not None)):
        return True  # all steps were taken before, and what they needed was written then
    if not folder.plan.is_file():
        watch.write_plan()  # which a checkpoint has from a run that died
    write_json(folder.memory, memory_facts(watch, model, slides, config))
    return True


def warn_of_lack(model: SlideClassifier, slides: SlideData, split: str) -> None:
    """Warn where scores that compare classes are not defined on a split."""
    if slides.of(split) and (lack := model.task.lack(slides.targets_of(split))):
        log.warning("the split %s has %s: scores that compare slides are not defined there", split, lack)


def start_of(folder: RunFolder, resume: str) -> Path | None:
    """The checkpoint to continue from; none where the run died before it wrote its first."""
    if resume == "last" and not folder.checkpoint_path("last").is_file():
        say(Console(), f"{folder.path} has no checkpoint yet: the run starts from the beginning")
        return None
    checkpoint = folder.checkpoint(resume)
    read_checkpoint(checkpoint)  # before anything is planned or written
    return checkpoint


def check_settings(model: SlideClassifier, data: DataConfig, config: TrainConfig) -> None:
    """Refuse settings that do not go together, before anything is read."""
    check_trackers(config)
    monitors = ["val_loss", *(f"val_{name}" for name in model.task.scores)]
    if config.monitor not in monitors:
        raise UserError(
            f"train.monitor is {config.monitor!r}; with {type(model.task).__name__} it is one of {', '.join(monitors)}"
        )
    if model.levels != 1 + len(data.context):
        raise UserError(
            f"data.context has {len(data.context)} further magnifications and model.levels is {model.levels}; "
            f"set it to {1 + len(data.context)}"
        )
    check_bags(model, data)
    if config.devices > 1 and data.on_error == "skip":
        raise UserError("data.on_error is skip with several devices, which would wait for each other; use stop")


def check_bags(model: SlideClassifier, data: DataConfig) -> None:
    """Refuse bags for a network that takes images, images for one that takes bags, and what bags have no use for."""
    encoder = model.backbone if isinstance(model.backbone, PatchEncoder) else None
    prepared = isinstance(model.backbone, FrozenFeatures)
    if prepared != (data.features is not None):
        raise UserError("model.backbone FrozenFeatures and data.features go together: give both, or neither")
    if prepared:
        if model.task.dense or model.wants_tissue:
            raise UserError(
                "data.features has a vector for each patch and no map of the slide; leave out what needs one"
            )
        return
    if data.patches is None:
        if encoder is not None:
            raise UserError("model.backbone is PatchEncoder, which takes patches, and data.patches is not given")
        return
    if encoder is None:
        raise UserError(
            f"data.patches makes a bag of each slide, and model.backbone {type(model.backbone).__name__} takes an "
            "image; set model.backbone to PatchEncoder, with this one as its network"
        )
    if encoder.size != data.patches.size:
        raise UserError(
            f"data.patches.size is {data.patches.size} and model.backbone.size is {encoder.size}; give both one value"
        )
    if encoder.published is not None and not _near(encoder.published.mpp, data.patches.resolution):
        log.warning(
            "data.patches.mpp is %s, and %s was trained at about %g; give that, unless you mean it",
            data.patches.mpp, encoder.published.name, encoder.published.mpp,
        )  # fmt: skip
    if model.task.dense:
        raise UserError(f"{type(model.task).__name__} has a class for each pixel of an image; leave out data.patches")
    if model.wants_tissue:
        key = "pool_over" if model.pool_over == "tissue" else "statistics"
        raise UserError(f"model.{key} is tissue, which is for whole images; data.patches.over: tissue chooses patches")


def _near(meant: float, given: float | None) -> bool:
    """Whether patches of this resolution look as those that an encoder was trained on; unknown is taken to."""
    return given is None or 0.66 <= given / meant <= 1.5


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
    failures = failure_log(data, folder)
    with logged_to(folder.log):
        trainer = evaluator(config, folder, progress, failures)
        slides = make_data(model, data, config, folder)
        predictions = predict(trainer, model, slides, split)
        warn_of_lack(model, slides, split)
    predictions.write(folder.predictions(split))
    scores: dict[str, object] = {"split": split, "checkpoint": checkpoint, "task": type(model.task).__name__}
    scores |= evaluate(predictions, config.resamples, scores=dict(model.task.scores))
    scores["skipped"] = [slide for log in failures for slide in log.slides]
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
    """Write the predictions of slides that need no label; returns the path of the CSV file."""
    load_weights(model, folder.checkpoint(checkpoint))
    records = data.records(manifest, labelled=False)
    if data.features is None:
        check_files(records)
    records = grouped(data, records, None)
    slides = unlabelled_loader(model, data, config, records)
    with logged_to(folder.log):
        trainer = evaluator(config, folder, progress, failure_log(data, folder))
        said = read_predictions(trainer.predict(model, dataloaders=slides))
    target = folder.path / "predictions" / f"{manifest.stem}.csv"
    rows = (
        [record.slide, record.patient, *(float(value) for value in said[record.slide])]
        for record in records
        if record.slide in said
    )
    write_table(target, ["slide", "patient", *model.task.names], rows)
    return target


def evaluator(config: TrainConfig, folder: RunFolder, progress: bool, logs: Sequence[FailureLog] = ()) -> pl.Trainer:
    """A Trainer that only predicts, on one device."""
    bars: list[Callback] = [RichProgressBar(leave=False)] if progress else []
    return make_trainer(config, folder.path, [*bars, *logs], progress=progress)


def load_weights(model: SlideClassifier, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into the model."""
    state = read_checkpoint(checkpoint)
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint} holds the weights of another network than the config's; use the config.yaml of its run"
        ) from error


def make_data(
    model: SlideClassifier, data: DataConfig, config: TrainConfig, begun: RunFolder | None = None
) -> SlideData:
    """The slides as the run's engine wants them; a run that has begun keeps its splits."""
    kept = None if begun is None or not begun.splits.is_file() else kept_slides(model.task, data, begun)
    return SlideData(data, model.task, config.seed, partial(image_of, config), tissue_stride(model), kept)


def kept_slides(task: Task, data: DataConfig, folder: RunFolder) -> list[SlideRecord]:
    """The slides of a run with their splits; changes of the manifest since are printed."""
    kept = read_splits(folder.splits, task.columns, filled=not task.may_be_empty)
    if data.manifest.is_file() and is_first():
        for line in changes_since(kept, read_manifest(data.manifest, data.root, labelled=False), task.columns):
            say(Console(), line)
    return kept


def unlabelled_loader(
    model: SlideClassifier, data: DataConfig, config: TrainConfig, records: Sequence[SlideRecord]
) -> DataLoader[SlideBatch]:
    """Slides without labels as the run's engine wants them."""
    dataset = SlideDataset(records, None, data, partial(image_of, config), None, tissue_stride(model))
    return in_order(dataset, data.workers)


def tissue_stride(model: SlideClassifier) -> int | None:
    """Pixels for one position of the map of tissue, where the model asks for one."""
    return model.stride if model.wants_tissue else None


def failure_log(data: DataConfig, folder: RunFolder) -> list[FailureLog]:
    """What notes slides that cannot be read, where the run may go on without them."""
    return [FailureLog(folder.failures)] if data.on_error == "skip" else []


def _callbacks(
    config: TrainConfig, model: SlideClassifier, slides: SlideData, folder: RunFolder, progress: bool
) -> list[Callback]:
    score = config.monitor.removeprefix("val_").removeprefix("label_")
    mode = "min" if score in LOWER_IS_BETTER else "max"
    keep: dict[str, Any] = {"dirpath": folder.checkpoints, "enable_version_counter": False}
    callbacks: list[Callback] = [
        *([Estimate(slides, config, folder)] if slides.config.features is None else []),
        ModelCheckpoint(filename="best", monitor=config.monitor, mode=mode, **keep),
        ModelCheckpoint(filename="last", **keep),  # save_last would write it only when there is a new best
        ReadAhead(),
        StepCheckpoint(folder.checkpoint_path("last"), config.checkpoint_every),
    ]
    if config.budget is None:
        callbacks.append(RandomState())
    if config.patience is not None:
        # A score may be undefined on few slides; that is no reason to end the run.
        callbacks.append(EarlyStopping(config.monitor, mode=mode, patience=config.patience, check_finite=False))
    if progress:
        callbacks.append(RichProgressBar(leave=False))
    return callbacks


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)
