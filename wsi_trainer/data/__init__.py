"""The manifest, the splits, and the loaders that make batches of one slide."""

from wsi_trainer.data.datamodule import DataConfig, SlideData, SlideDataset
from wsi_trainer.data.folds import changes_since, folds, read_splits, write_folds
from wsi_trainer.data.images import dense, open_image
from wsi_trainer.data.manifest import SlideRecord, check_files, read_manifest, write_manifest
from wsi_trainer.data.patches.bag import open_bag
from wsi_trainer.data.patches.config import PatchConfig
from wsi_trainer.data.pixels import pixels_of
from wsi_trainer.data.splits import check_leakage, complete_splits

__all__ = [
    "DataConfig",
    "PatchConfig",
    "SlideData",
    "SlideDataset",
    "SlideRecord",
    "changes_since",
    "check_files",
    "check_leakage",
    "complete_splits",
    "dense",
    "folds",
    "open_bag",
    "open_image",
    "pixels_of",
    "read_manifest",
    "read_splits",
    "write_folds",
    "write_manifest",
]
