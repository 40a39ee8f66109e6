"""A file of regions, by its ending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from wsi_trainer.regions.geojson import read_geojson
from wsi_trainer.regions.legend import Legend
from wsi_trainer.regions.region import Region, RegionsError
from wsi_trainer.regions.xml import read_xml
from wsi_trainer.slide.geometry import SlideTransform

if TYPE_CHECKING:
    from lightning_plugin import TileSource

Reader = Callable[[Path], list[Region]]

OUTLINES: Mapping[str, Reader] = {".geojson": read_geojson, ".json": read_geojson, ".xml": read_xml,
                                  ".annotations": read_xml}  # fmt: skip
"""Files of outlines; HALO names its XML .annotations."""
LABELS = (".tif", ".tiff", ".zarr")
"""Label images, a number for each pixel. A label within a store is a folder, which may have any name."""


def read_regions(path: Path) -> list[Region]:
    """The regions of a file of outlines."""
    reader = OUTLINES.get(path.suffix.lower())
    if reader is None:
        raise RegionsError(path, f"is no file of outlines; these end in {', '.join(OUTLINES)}")
    try:
        return reader(path)
    except OSError as error:
        raise RegionsError(path, f"cannot be read: {error.strerror or error}") from error


def open_target(
    path: Path | None, legend: Legend, slide: Path, size: tuple[int, int], place: SlideTransform
) -> TileSource:
    """The map of classes of a slide's image, to be read box by box.

    Args:
        path: What was drawn: outlines or a label image; None where nothing was.
        legend: Which class each name means.
        slide: The slide or the store.
        size: Height and width of the image of it.
        place: Where that image lies in the slide.
    """
    from wsi_trainer.regions.drawn import DrawnSource  # these need torch, and outlines are read without
    from wsi_trainer.regions.labels import LabelSource, open_labels

    if path is None:
        return DrawnSource([], legend.ground, size)
    if path.suffix.lower() in LABELS or path.is_dir():
        inside = path.resolve().is_relative_to(slide.resolve())  # a label of the store itself
        return LabelSource.of(open_labels(path), legend, size, None if inside else place, path)
    return DrawnSource.of(read_regions(path), legend, place, size, path)
