"""All slides of a split: what is found on each, as a label image and as outlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shapely
from rich.progress import Progress

from lightning_plugin import LazyImage
from wsi_trainer.data import DataConfig, SlideDataset, SlideRecord, open_image
from wsi_trainer.data.sampling import Visit
from wsi_trainer.models import SlideClassifier
from wsi_trainer.places.geojson import PathClass
from wsi_trainer.segment.blocks import blocks_of, predicted
from wsi_trainer.segment.outlines import joined, pieces, write_outlines
from wsi_trainer.segment.store import add_levels, create_labels
from wsi_trainer.slides.errors import SlideError


@dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """The options of `wsi-train segment`."""

    block: int = 4096
    """Side of the squares that are computed and written one after the other, in pixels."""
    smallest: int = 64
    """Regions of fewer pixels get no outline in the GeoJSON file; the label image has them."""


def write_segments(
    model: SlideClassifier, records: Sequence[SlideRecord], data: DataConfig, folder: Path, options: SegmentOptions,
    budget: int | str,
) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """Write NAME.ome.zarr and NAME.geojson of each slide; returns what is there of it, and why others were left out."""
    folder.mkdir(parents=True, exist_ok=True)
    slides = SlideDataset(records, None, data, LazyImage)
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with Progress(transient=True) as bar:
        for number, record in enumerate(records):
            try:
                batch = slides[Visit(number, 0)]
                if "failure" in batch:
                    raise SlideError(record.slide, batch["failure"])
                image = batch["image"].to(model.device)
                height, width = image.shape[2:]
                task = bar.add_task(record.slide, total=len(blocks_of(height, width, options.block)))
                found[record.slide] = _segment(model, record, data, image, folder, options, budget, bar, task)
            except SlideError as error:
                if data.on_error == "stop":
                    raise
                skipped[record.slide] = error.reason
    return found, skipped


def _segment(
    model: SlideClassifier, record: SlideRecord, data: DataConfig, image: Any, folder: Path, options: SegmentOptions,
    budget: int | str, bar: Progress, task: Any,
) -> dict[str, Any]:  # fmt: skip
    name = record.slide.replace("%", "%25").replace("/", "%2F")
    classes, size = model.task.classes, (int(image.shape[2]), int(image.shape[3]))
    place = open_image(record.path, data.downsample, record.mpp).place
    labels = create_labels(folder / f"{name}.ome.zarr", size, classes, place)
    shown = {number: PathClass.of(its, number) for number, its in enumerate(classes) if number}
    parts: dict[PathClass, list[shapely.Polygon]] = {its: [] for its in shown.values()}
    for box, values in predicted(model, image, options.block, budget):
        labels[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]] = values
        for number, its in shown.items():
            parts[its] += pieces(values == number, box)
        bar.advance(task)
    add_levels(folder / f"{name}.ome.zarr", place)
    regions = {its: joined(polygons, options.smallest) for its, polygons in parts.items()}
    write_outlines(folder / f"{name}.geojson", regions, place)
    return {
        "labels": f"{name}.ome.zarr",
        "outlines": f"{name}.geojson",
        "regions": {its.name: len(polygons) for its, polygons in regions.items()},
    }
