"""The command `segment`: predicted classes of whole slides as label images and outlines, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lightning_plugin import Box, TileSource, materialize
from wsi_trainer.data.dataset import drawn_on
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.fit.opening import fields_of, open_run, run_parser
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.fit.scoring import keep_slides
from wsi_trainer.fit.trainer import at_work
from wsi_trainer.io.display import say
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import Interval
from wsi_trainer.models import SlideSegmenter
from wsi_trainer.models.allowed import limits_imports
from wsi_trainer.regions.geojson import PathClass, write_outlines
from wsi_trainer.regions.ngff import add_levels, create_labels
from wsi_trainer.regions.shapes import joined, pieces
from wsi_trainer.regions.target import blocks_of
from wsi_trainer.segment.scores import Judged, Points, highest, judge, write_scores
from wsi_trainer.slide.augment import Augmented
from wsi_trainer.slide.names import result_names
from wsi_trainer.slide.views import Image


@dataclass(frozen=True, eq=False)
class Found:
    """Prediction of a box of the slide."""

    box: Box
    classes: NDArray[np.uint8]
    """The place of each pixel's most likely class."""
    probability: NDArray[np.float32] | None
    """Of that class, where it was asked for."""


class OneBlock(nn.Module):
    """The most likely class of each pixel of a box of the slide, and perhaps its probability, as maps of one number for
    each pixel: what else the slide has is not computed.
    """

    def __init__(self, model: SlideSegmenter, probability: bool = False) -> None:
        super().__init__()
        self.model = model
        self.probability = probability

    def forward(self, image: Tensor, box: Box) -> Tensor:
        (top, left), (bottom, right) = box.lo, box.hi
        logits = self.model(image)[:, :, top:bottom, left:right]
        if not self.probability:
            return logits.argmax(dim=1).to(torch.uint8)
        highest = logits.softmax(dim=1).amax(dim=1)
        return torch.cat([logits.argmax(dim=1).to(highest.dtype), highest])  # one map, so that it is computed once


def predicted(network: nn.Module, image: Tensor, side: int) -> Iterator[Found]:
    """Predictions block by block: those of the whole slide, halos and statistics included.

    Args:
        network: What answers `OneBlock`, tile by tile or as plain PyTorch, each time on the whole slide.
        image: The slide, dense or a `LazyImage`.
        side: Pixels of a block: one with the probability of each pixel's class takes more memory.
    """
    for box in blocks_of(image.shape[2], image.shape[3], side):
        with torch.no_grad():
            found = materialize(network(image, box)).cpu().numpy()
        yield Found(box, found[0].astype(np.uint8), found[1].astype(np.float32) if len(found) > 1 else None)


@dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """The options of `wsi-train segment`."""

    block: int = 2048
    """Side of the squares that are computed and written one after the other, in pixels: smaller ones need less memory.
    """
    smallest: int = 64
    """Regions of fewer pixels get no outline in the GeoJSON file and are no detections; the label image has them."""
    compare: bool = True
    """Compare the found regions with the drawn ones, where the manifest has the column regions. A block takes eight
    bytes a pixel then, and one without.
    """
    tolerance: float = 10.0
    """Micrometres by which a found border may be off the drawn one, in the scores of borders."""

    join: float = 0.0
    """Lesions within so many micrometres of each other are one, and a detection within half of that of one is in it: 75
    scores them as CAMELYON16's program does, 0 as they are drawn.
    """

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UserError(f"--block is {self.block}; it must be 1 or more")
        if not 0 <= self.tolerance < float("inf"):
            raise UserError(f"--tolerance is {self.tolerance}; it must be 0 or more micrometres")
        if not 0 <= self.join < float("inf"):
            raise UserError(f"--join is {self.join}; it must be 0 or more micrometres")


@dataclass(frozen=True)
class Segments:
    """Writer of the segments of slides."""

    model: SlideSegmenter
    predictor: Predictor
    folder: Path
    names: Mapping[str, str]
    """By slide, the name of its files."""
    options: SegmentOptions
    bar: Progress

    def write(self, record: SlideRecord) -> dict[str, Any]:
        """Write NAME.ome.zarr and NAME.geojson of a slide; returns what all slides together need of it."""
        with self.predictor.opened(record) as (batch, view):
            assert isinstance(view, Image)
            image = batch["image"]
            total = len(blocks_of(image.shape[2], image.shape[3], self.options.block))
            return self._write(record, image, view, self.bar.add_task(record.slide, total=total))

    def _write(self, record: SlideRecord, image: Any, source: Image, task: Any) -> dict[str, Any]:
        name = self.names[record.slide]
        drawn = self._drawn(record, source)
        if drawn is not None and self.options.join and source.resolution is None:
            raise SlideError(
                record.slide,
                "does not say how large its pixels are, which --join needs; fill in the manifest's column mpp",
            )
        question = OneBlock(self.model, probability=drawn is not None)
        blocks = predicted(self.predictor.network(question, question.probability), image, self.options.block)
        classes, store = self.model.pixels.classes, self.folder / f"{name}.ome.zarr"
        labels = create_labels(store, (source.shape[2], source.shape[3]), classes, source.place)
        parts, points = _taken(self.bar.track(blocks, task_id=task), labels, len(classes))
        add_levels(store, source.place)
        regions = [joined(polygons, self.options.smallest) for polygons in parts]
        shown = [PathClass.of(its, number) for number, its in enumerate(classes)][1:]
        write_outlines(self.folder / f"{name}.geojson", dict(zip(shown, regions, strict=True)), source.place)
        judged = None
        if drawn is not None:
            own = source.resolution
            pixel = None if own is None else (own.y, own.x)
            judged = judge(labels, regions, points, drawn, pixel, self.options.tolerance, self.options.join)
        files = {
            "labels": f"{name}.ome.zarr",
            "outlines": f"{name}.geojson",
            "regions": {its: len(polygons) for its, polygons in zip(classes[1:], regions, strict=True)},
        }
        return {"files": files, "judged": None if judged is None else judged.to_dict()}

    def _drawn(self, record: SlideRecord, source: Image) -> TileSource | None:
        if not self.options.compare or "regions" not in record.others:
            return None
        return Augmented(drawn_on(record, source, self.model.pixels.legend), name=record.slide)


def _taken(blocks: Iterable[Found], labels: Any, classes: int) -> tuple[list[list[shapely.Polygon]], list[Points]]:
    """Write each block to the label image; returns of each class but the first its polygons and their best points."""
    parts: list[list[shapely.Polygon]] = [[] for _ in range(1, classes)]
    points: list[list[Points]] = [[np.empty((0, 3))] for _ in parts]
    for one in blocks:
        (top, left), (bottom, right) = one.box.lo, one.box.hi
        labels[top:bottom, left:right] = one.classes
        for number, (polygons, best) in enumerate(zip(parts, points, strict=True), start=1):
            mask = one.classes == number
            polygons += pieces(mask, one.box.lo)
            if one.probability is not None:
                best.append(highest(mask, one.probability, one.box))
    return parts, [np.concatenate(best) for best in points]


@limits_imports
def segment(words: Sequence[str]) -> int:
    """Write what a model with a class for each pixel finds on slides."""
    parser = run_parser(
        "segment",
        "Write the predicted class of each pixel of whole slides, block by block: an OME-Zarr label image and GeoJSON "
        "outlines for QuPath, in pixels of the slide, in the folder segments of the run (segments/SPLIT for a --split "
        "that is not test). For runs of SegmentationTask. Where the manifest has the column regions, what is found is "
        "also compared with what is drawn, with 95 % intervals by patient (scores.json, borders.csv, lesions.csv): F1 "
        "of borders within --tolerance micrometres, and FROC, the share of lesions that is detected at 1/4 to 8 false "
        "positives for each slide, where a found region stands for its most probable point. `wsi-train report` then "
        "shows them.",
    )
    parser.add_argument("--split", type=str, default="test", help="which slides of the run: train, val or test")
    parser.add_argument("--slides", type=Path, default=None, help="a manifest of other slides, instead of a split")
    parser.add_argument(
        "--name", type=str, default=None, help="the name of these slides, or of a cohort that was tested"
    )
    parser.add_class_arguments(SegmentOptions)
    run, options = open_run(parser, words)
    chosen = fields_of(SegmentOptions, options)
    result = run.result("segment", "test" if options.slides is not None else options.split)
    result.keep(options.overwrite)
    model, data, config = run.loaded
    if not isinstance(model, SlideSegmenter):
        raise UserError(f"{type(model.task).__name__} has one prediction for a slide; segment is for SegmentationTask")
    if options.slides is None:
        records = run.records(options.split)
    else:
        records = run.as_seen(run.records_in(options.slides, options.data_root, labelled=False))
    with result.locked(options.overwrite):
        if options.slides is not None:
            keep_slides(run, records)
        work = run.work(result, records, chosen, options.overwrite)
        classes = list(model.pixels.classes)
        names = result_names([record.slide for record in records])
        result.folder.mkdir(parents=True, exist_ok=True)
        with at_work(run.path), Progress(transient=True) as bar:
            segments = Segments(model, run.predictor, result.folder, names, chosen, bar)
            skipped = work.each(records, segments.write, data.on_error)
        made = [(record.slide, one) for record, one in work.finished(records)]
        found = {slide: one["files"] for slide, one in made}
        judged = {slide: Judged.of(one["judged"]) for slide, one in made if one["judged"] is not None}
        facts = {"split": "" if options.slides else options.split, "tolerance": chosen.tolerance, "join": chosen.join}
        scores = write_scores(result.folder, records, judged, classes, facts, config.resamples)
        write_json(result.file, {"classes": classes, "slides": found, "skipped": skipped})
        run.finish(work)
    console = Console()
    say(console, f"{len(found)} slides: {result.folder}")
    for line in sentences_on(scores):
        say(console, line)
    for slide, reason in skipped.items():
        say(console, f"left out: {slide}: {reason}")
    return 0


def sentences_on(scores: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the scores in scores.json."""
    named = {"lesions": ("froc", "lesions, FROC"), "borders": ("border_f1", "borders, F1")}
    for kind, (score, text) in named.items():
        if kind in scores:
            found = Interval.of(scores[kind]["slide"][score])
            yield f"{text}: {found} on {scores[kind]['slides']} slides of {scores[kind]['patients']} patients"
    for slide in scores.get("without_micrometres", ()):
        yield f"no scores of borders: {slide} does not say how large its pixels are; fill in the manifest's column mpp"
