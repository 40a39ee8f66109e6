"""The Trainer of a run and its surroundings: loggers, checkpoint files, log file, end of the process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import Callback, RichProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from lightning_plugin import LazyImage, SFTDDPStrategy, SFTStrategy, WholeCheckpoints
from wsi_trainer.data.dataset import ToImage, dense
from wsi_trainer.errors import UserError, explain_full_disk
from wsi_trainer.fit.config import AUTO, Tracker, TrainConfig
from wsi_trainer.fit.folder import RunFolder
from wsi_trainer.io.display import LOGGERS, CleanFormatter, clean, listening
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.models.weights import read_checkpoint
from wsi_trainer.signals import GRACE, Stopped, ends_at_once


def image_of(config: TrainConfig) -> ToImage:
    """Makes the image of a batch: lazy where a budget is given, else read whole."""
    return dense if config.budget is None else LazyImage


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
            options["strategy"] = strategy(budget=budget, **engine_options(config))
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


def engine_options(config: TrainConfig) -> dict[str, Any]:
    """The options of the engine beside the budget."""
    return {
        "halo": config.halo, "splits": config.split_grid, "split_depth": config.split_depth,
        "wobble": config.split_jitter, "compile": config.compile, "trim": config.trim,
    }  # fmt: skip


class Bar(RichProgressBar):
    """The progress bar, without the number of a version: folders of runs have names."""

    def __init__(self) -> None:
        super().__init__(leave=False)

    def get_metrics(self, *of: Any) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(*of).items() if name != "v_num"}


def precision_of(config: TrainConfig) -> str:
    """The Trainer's precision."""
    if config.precision != AUTO:
        return config.precision
    return "bf16-mixed" if device_of(config).type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"


def device_of(config: TrainConfig) -> torch.device:
    """The device of the Trainer."""
    gpu = config.accelerator in (AUTO, "cuda", "gpu") and torch.cuda.is_available()
    return torch.device("cuda" if gpu else "cpu")


@contextmanager
def trackers(config: TrainConfig, run: RunFolder) -> Iterator[list[Logger]]:
    """The loggers that the config names, all writing into the folder of the run; closed at the end.

    Weights & Biases has one run at a time: left open it would go on into the next fold's.
    """
    loggers = [_logger(name, run) for name in dict.fromkeys(config.loggers)]
    services = [logger for logger in loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    if run.config.is_file():
        options = read_yaml(run.config)
        for service in services:
            service.log_hyperparams(options)
    status = "failed"
    try:
        yield loggers
        status = "success"
    finally:
        for service in services:
            if isinstance(service, WandbLogger):
                _finish(service, failed=status == "failed")
            else:
                service.finalize(status)


def check_trackers(config: TrainConfig) -> None:
    """Raise an error that names the extra to install for a logger that is not there."""
    for name in config.loggers:
        if name in ("wandb", "mlflow") and find_spec(name) is None:
            raise UserError(f"train.loggers names {name}, which is not installed: pip install 'wsi-trainer[tracking]'")


def _logger(name: Tracker, run: RunFolder) -> Logger:
    if name == "csv":
        return CSVLogger(run.path, name=run.metrics.name)  # a resumed run writes a further version_N
    if name == "tensorboard":
        return TensorBoardLogger(run.path, name="", version="tensorboard")
    if name == "wandb":
        return WandbLogger(name=run.path.name, save_dir=run.path, project="wsi-train")
    # Its former default, a folder of files, is refused by MLflow 3.
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.resolve() / 'mlflow.db'}"
    return MLFlowLogger("wsi-train", run_name=run.path.name, tracking_uri=uri)


@rank_zero_only
def _finish(logger: WandbLogger, failed: bool) -> None:
    logger.experiment.finish(exit_code=int(failed))


# Checkpoints.


class Checkpoints(WholeCheckpoints):
    """Checkpoints that are written whole or not at all, without a second copy in memory, and read without running
    anything that they hold."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file under its name once it is safe on the disk."""
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            kept = "; the checkpoint before it is kept" if Path(path).is_file() else ""
            raise UserError(
                f"{path} cannot be written: {error.strerror}{kept}; mend it and continue with --resume last"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """Read the file: tensors and plain values only."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file."""
        Path(path).unlink(missing_ok=True)


# Process.

_KNOWN = (
    ".*does not have many workers.*",  # one slide is read while the step computes: workers would not help
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning and torch, not the user, have to settle this
    ".*estimate number of stepping batches.*",
    ".*exists and is not empty.*",
    ".*deprecated in v4.49.0.*",
    ".*recommended to use `self.log.*sync_dist.*",  # every device computes the scores of all slides
    ".*`training_step` returned `None`.*",  # a slide was left out, which is said in other words
)


class LogFile(logging.FileHandler):
    """The log of a run; where it cannot be written the run goes on without it, and says so once."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.setLevel(logging.CRITICAL + 1)
        said = clean(f"wsi-train: warning: the run goes on without {self.baseFilename}: {error.strerror}")
        print(said, file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # of what could not be written: that was said
            self.stream = None  # type: ignore[assignment]  # closed all the same


@contextmanager
def quiet() -> Iterator[None]:
    """In this context only warnings of Lightning go to the console."""
    consoles = [(h, h.level) for name in LOGGERS for h in logging.getLogger(name).handlers]
    for console, _ in consoles:
        console.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _KNOWN:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for console, level in consoles:
            console.setLevel(level)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """In this context messages of a run go to a file; only warnings also go to the console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(CleanFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    try:
        with quiet(), listening(handler):
            yield
    finally:
        handler.close()


@contextmanager
def at_work(run: Path, grace: float = GRACE) -> Iterator[None]:
    """In this context signals end the command soon, and a full disk or a killed reader of slides is one clear error.

    Args:
        run: The folder whose disk is named where it is full.
        grace: Seconds to unwind after a signal. Lightning alone would finish the step, and end as if all were well.
    """
    with ends_at_once(grace), explain_full_disk(run):
        try:
            yield
        except SystemExit as stop:
            if isinstance(stop.__context__, Stopped):
                raise stop.__context__ from None
            raise
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(
                "a process that opens slides ahead (data.workers) has ended: it was killed, or memory is short; "
                "try data.workers 0"
            ) from error
