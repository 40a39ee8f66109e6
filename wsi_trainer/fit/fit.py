"""A run, from its config to scores, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rich.console import Console

from wsi_trainer.data.covariates import Covariates
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig, pixels_of
from wsi_trainer.errors import UserError
from wsi_trainer.fit.callbacks import (
    Estimate,
    FailureLog,
    MemoryWatch,
    Progress,
    RandomState,
    StepCheckpoint,
    memory_facts,
)
from wsi_trainer.fit.config import OF_RUN, Config, Loaded, TrainConfig, check_settings, present_keys
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.scoring import show, test_split
from wsi_trainer.fit.status import recorded
from wsi_trainer.fit.trainer import Bar, at_work, check_trackers, image_of, logged_to, make_trainer, trackers
from wsi_trainer.io.display import say
from wsi_trainer.io.files import as_written, write_json, write_text
from wsi_trainer.io.untrusted import read_yaml, yaml_of
from wsi_trainer.metrics import is_lower_better
from wsi_trainer.models import ModelConfig, SegmentationTask, SlideModel
from wsi_trainer.models.weights import load_weights
from wsi_trainer.signals import GRACE

SERVICES = {"wandb", "mlflow"}
MOMENT = 3.0
"""Seconds for loggers that are services to send what they have when a signal ends a run."""
DEFAULTS = {
    f"{part}.{one.name}": one.default
    for part, keys in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig))
    for one in fields(keys)
    if isinstance(one.default, str | int | float)
}
"""Values of keys that the config of an earlier version may not have."""
FREE = ("model.pretrained", "model.head_pretrained")
"""Keys of the model that say nothing to a run that goes on."""


def run_fit(config: Config, resume: str | None = None, progress: bool = True, split: str = "test") -> Run:
    """Train, and test on a split.

    Args:
        config: What the run is to be.
        resume: A checkpoint to continue from: "last", or a path.
        progress: Whether to show a progress bar.
        split: The split that is predicted and scored at the end.
    """
    run = Run(config.out)
    first = is_first()  # with several devices the others run this command too, and write nothing
    _check_free(run, resume)
    with run.locked() if first else nullcontext():
        if first:
            _check_free(run, resume)  # from another, which has ended meanwhile
        config = with_covariates(config, run, resume)
        loaded = config.build()
        if resume is not None and run.splits.is_file():
            run = run.below(loaded.data.stores or loaded.data.root)
        if first:
            _write_config(run, config.text, resume)
        grace = MOMENT if SERVICES & set(loaded.train.loggers) else GRACE
        with (
            recorded(run.status) if first else nullcontext() as status,
            at_work(run.path, grace),
        ):
            watchers: list[Callback] = [] if status is None else [Progress(status)]
            if not train(run, loaded, resume, progress, watchers):
                return run
            run.decisions.unlink(missing_ok=True)  # of weights that were trained on since
            trained = run.holding(loaded)
            scores = test_split(trained, split, progress)
    show(scores, trained)
    for cohort, which in product([None, *trained.cohorts], ("best", "last")):
        if outdated := replace(trained, cohort=cohort, chosen=which).outdated:
            say(Console(), outdated)
    return trained


def train(
    run: Run, loaded: Loaded, resume: str | None = None, progress: bool = True, watchers: Sequence[Callback] = ()
) -> bool:
    """Train the model; returns whether this process is the first of those that trained: it alone tests and writes.

    Args:
        run: The folder that everything goes into.
        loaded: The network with the weights to start from, the slides, and how long and within which memory.
        resume: A checkpoint to continue from: "last", or a path.
        progress: Whether to show a progress bar.
        watchers: Callbacks that only look on.
    """
    model, data, config = loaded
    check_settings(model, data, config)
    check_trackers(config)
    slides = make_data(run, loaded, resume)
    for line in slides.unknown() if is_first() else ():
        say(Console(), line)
    if lack := model.task.lacking(slides.targets_of("train")):
        raise UserError(f"the split train has {lack}: nothing can be learnt; look at the labels, or divide them anew")
    slides.warn_of_lack("val")
    model.task.prepare_from(slides.targets_of("train"))
    checkpoint = None if resume is None else start_of(run, model, resume)
    if isinstance(pixels := model.task.pixels, SegmentationTask) and pixels.weights.balanced and checkpoint is None:
        # What a checkpoint holds needs no counting.
        pixels.prepare_pixels(pixels_of(slides.of("train"), pixels, data, progress and is_first()))
    matches = {} if checkpoint is not None else {
        run.pretrained: model.load_pretrained(), run.head_pretrained: model.load_pretrained_head()
    }  # fmt: skip
    for path, match in matches.items():
        if match is not None:
            for line in str(match).splitlines():
                say(Console(), line)
            write_json(path, match.to_dict())
    watch = MemoryWatch(run.plan if is_first() else None)
    callbacks = [watch, *watchers, *callbacks_of(run, config, slides, progress)]
    with logged_to(run.log), trackers(config, run) as loggers:
        trainer = make_trainer(config, run.path, callbacks, loggers, progress, devices=config.devices)
        trainer.fit(model, datamodule=slides, ckpt_path=checkpoint, weights_only=True)
    if not trainer.is_global_zero:
        return False
    if not watch.steps and (run.memory.is_file() or not watch.image_shape):
        return True  # all steps were taken before, and what they needed was written then
    if not run.plan.is_file():
        watch.write_plan()  # which a checkpoint has from a run that died
    write_json(run.memory, memory_facts(watch, model, data, config))
    return True


def with_covariates(config: Config, run: Run, resume: str | None) -> Config:
    """The config with the numbers of its covariates: those that the run began with, or those of its training slides."""
    kept = None
    if resume is not None and run.begun and run.splits.is_file():
        with as_written(run.config):
            kept = Covariates.of(read_yaml(run.config)["model"].get("covariates"))
    fitted = config.fitted(kept if kept and kept.fitted else None)
    if fitted.covariates and is_first():
        say(Console(), f"beside each slide: {fitted.covariates}")
    return fitted


def make_data(run: Run, loaded: Loaded, resume: str | None) -> SlideData:
    """The slides with their splits: drawn once, and kept by a run that has begun."""
    model, data, config = loaded
    task, features = model.task, data.features
    make = partial(
        SlideData, data, task, config.seed, image_of(config), model.tissue_stride,
        places=model.wants_places, covariates=model.covariates, sees_slide=model.sees_slide,
    )  # fmt: skip
    if resume is not None and run.begun and run.splits.is_file():
        if is_first():
            run.tell_changes(data, task.columns, model.covariates.names)
        return make(kept=run.records(None, task.columns, not task.may_be_empty, features))
    slides = make()
    if is_first():
        own = features is None and (data.patches is None or data.patches.mpp == "own")
        run.freeze(slides.records, own, features)
    return slides


def callbacks_of(run: Run, config: TrainConfig, slides: SlideData, progress: bool) -> list[Callback]:
    """The callbacks that a run needs besides those that look on."""
    mode = "min" if is_lower_better(config.monitor.removeprefix("val_")) else "max"
    keep: dict[str, Any] = {"dirpath": run.checkpoints, "enable_version_counter": False}
    callbacks: list[Callback] = [
        *([FailureLog(run.failures)] if slides.config.on_error == "skip" else []),
        *([Estimate(slides, config, run)] if slides.config.features is None and slides.sees_slide else []),
        ModelCheckpoint(filename="best", monitor=config.monitor, mode=mode, **keep),
        ModelCheckpoint(filename="last", **keep),  # save_last would write it only when there is a new best
        StepCheckpoint(run.checkpoint_path("last"), config.checkpoint_every),
    ]
    if config.budget is None:
        callbacks.append(RandomState())
    if config.patience is not None:
        # A score may be undefined on few slides; that is no reason to end the run.
        callbacks.append(EarlyStopping(config.monitor, mode=mode, patience=config.patience, check_finite=False))
    if progress:
        callbacks.append(Bar())
    return callbacks


def start_of(run: Run, model: SlideModel, resume: str) -> Path | None:
    """The checkpoint to continue from, of this network; none where the run died before it wrote its first."""
    if resume == "last" and not run.checkpoint_path("last").is_file():
        say(Console(), f"{run.path} has no checkpoint yet: the run starts from the beginning")
        return None
    checkpoint = run.checkpoint(resume)
    load_weights(model, checkpoint)  # refuses another's before anything is planned or written
    return checkpoint


def is_first() -> bool:
    """True in the process that writes: with several devices the others run the same command beside it."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def _check_free(run: Run, resume: str | None) -> None:
    if is_first() and run.begun and resume is None:
        raise UserError(f"{run.path} holds a run already; choose another --out, or continue with --resume last")


def _write_config(run: Run, said: str, resume: str | None) -> None:
    if resume is not None and run.begun:
        for line in changed(run.config, yaml_of(said, run.config)):
            say(Console(), line)
    write_text(run.config, said)


def changed(path: Path, asked: Mapping[str, Any]) -> list[str]:
    """Differences of a config from the one before, a sentence for each key.

    Raises:
        UserError: The network is another one, or trained otherwise, whose weights and optimizer a checkpoint holds.
    """
    with as_written(path):
        before, now = DEFAULTS | flat(present_keys(read_yaml(path))), flat(asked)
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key) and key != "out"]
    fixed = [key for key in keys if key.startswith("model.") and key not in FREE]
    if fixed:
        key = fixed[0]
        raise UserError(
            f"{path}: {key} was {before.get(key)!r} and is {now.get(key)!r} now; a run goes on with the model that it "
            "began with. Take it back, or choose another --out"
        )
    kept = "; the run keeps the splits that it has"
    return [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r} from now on{kept if key in OF_RUN else ''}"
        for key in keys
    ]


def flat(content: Any, name: str = "") -> dict[str, Any]:
    """The values of a config, by the whole names of their keys."""
    if not isinstance(content, Mapping) or not content:
        return {name: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found
