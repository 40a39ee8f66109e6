"""Drawn regions: annotation files as targets that are cut tile by tile and never rasterised whole.

A file becomes `Region`s (`read_regions`), a `Legend` says which class each of them means, and a `DrawnSource` is the
map of classes of a slide, one number for each pixel, that an engine reads box by box like the slide itself.
"""

from wsi_trainer.regions.counts import counted
from wsi_trainer.regions.drawn import DrawnSource
from wsi_trainer.regions.files import open_target, read_regions
from wsi_trainer.regions.legend import IGNORED, Legend
from wsi_trainer.regions.region import Region

__all__ = ["IGNORED", "DrawnSource", "Legend", "Region", "counted", "open_target", "read_regions"]
