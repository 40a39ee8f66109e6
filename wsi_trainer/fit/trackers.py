"""Where curves go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import Tracker, TrainConfig
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.foreign import read_yaml


@contextmanager
def trackers(config: TrainConfig, folder: RunFolder) -> Iterator[list[Logger]]:
    """The loggers that the config names, all writing into the folder of the run; closed at the end.

    Weights & Biases has one run at a time: left open it would go on into the next fold's.
    """
    loggers = [_logger(name, folder) for name in dict.fromkeys(config.loggers)]
    services = [logger for logger in loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    if folder.config.is_file():
        options = read_yaml(folder.config)
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


def _logger(name: Tracker, folder: RunFolder) -> Logger:
    if name == "csv":
        return CSVLogger(folder.path, name=folder.metrics.name)  # a resumed run writes a further version_N
    if name == "tensorboard":
        return TensorBoardLogger(folder.path, name="", version="tensorboard")
    if name == "wandb":
        return WandbLogger(name=folder.path.name, save_dir=folder.path, project="wsi-train")
    # Its former default, a folder of files, is refused by MLflow 3.
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.path.resolve() / 'mlflow.db'}"
    return MLFlowLogger("wsi-train", run_name=folder.path.name, tracking_uri=place)


@rank_zero_only
def _finish(logger: WandbLogger, failed: bool) -> None:
    logger.experiment.finish(exit_code=int(failed))
