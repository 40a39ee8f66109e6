"""The Trainer of a run: plain PyTorch or tile by tile, its loggers, and its checkpoints."""

from __future__ import annotations

import os
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
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import AUTO, Tracker, TrainConfig
from wsi_trainer.fit.run import Run
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.models.weights import read_checkpoint


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
            options["strategy"] = strategy(
                budget=budget, halo=config.halo, splits=config.split_grid, split_depth=config.split_depth,
                wobble=config.split_jitter, compile=config.compile, trim=config.trim,
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
    gpu = config.accelerator in (AUTO, "cuda", "gpu") and torch.cuda.is_available()
    return "bf16-mixed" if gpu and torch.cuda.is_bf16_supported() else "32-true"


@contextmanager
def trackers(config: TrainConfig, run: Run) -> Iterator[list[Logger]]:
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


def _logger(name: Tracker, run: Run) -> Logger:
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
