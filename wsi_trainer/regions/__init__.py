"""Drawn regions: annotation files as targets that are cut tile by tile and never rasterised whole.

A file becomes `Region`s (`read_regions`), a `Legend` says which class each of them means, and a `DrawnSource` is the
map of classes of a slide, one number for each pixel, that an engine reads box by box like the slide itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wsi_trainer.regions.legend import IGNORED, Legend
from wsi_trainer.regions.region import Region

if TYPE_CHECKING:
    from wsi_trainer.regions.counts import counted
    from wsi_trainer.regions.drawn import DrawnSource
    from wsi_trainer.regions.files import open_target, read_regions

__all__ = ["IGNORED", "DrawnSource", "Legend", "Region", "counted", "open_target", "read_regions"]

_HOMES = {"counted": "counts", "DrawnSource": "drawn", "open_target": "files", "read_regions": "files"}


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for: files of outlines are read without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
