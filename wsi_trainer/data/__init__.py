"""The manifest, the splits, and the loaders that make batches of one slide.

Names are imported when they are first asked for: commands that read a manifest need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsi_trainer.data.datamodule import DataConfig, SlideData, SlideDataset
    from wsi_trainer.data.folds import changes_since, read_splits, write_folds
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
    "open_bag",
    "open_image",
    "pixels_of",
    "read_manifest",
    "read_splits",
    "write_folds",
    "write_manifest",
]

_HOMES = {
    "datamodule": "DataConfig SlideData SlideDataset",
    "folds": "changes_since read_splits write_folds",
    "images": "dense open_image",
    "manifest": "SlideRecord check_files read_manifest write_manifest",
    "patches.bag": "open_bag",
    "patches.config": "PatchConfig",
    "pixels": "pixels_of",
    "splits": "check_leakage complete_splits",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
