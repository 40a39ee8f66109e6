"""Where curves go."""

from __future__ import annotations

from importlib.util import find_spec

from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import Tracker, TrainConfig
from wsi_trainer.fit.run_folder import RunFolder


def make_loggers(config: TrainConfig, folder: RunFolder) -> list[Logger]:
    """The loggers that the config names, all writing into the folder of the run."""
    return [_logger(name, folder) for name in dict.fromkeys(config.loggers)]


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
    return MLFlowLogger("wsi-train", run_name=folder.path.name, save_dir=str(folder.path / "mlruns"))
