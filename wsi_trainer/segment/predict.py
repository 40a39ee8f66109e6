"""The command `segment`: predicted classes of whole slides as label images and outlines, box by box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shapely
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lightning_plugin import Box, Sink, TileSource, infer
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
from wsi_trainer.regions.shapes import joined, pieces
from wsi_trainer.regions.sink import SlideSink
from wsi_trainer.segment.scores import Judged, Points, highest, judge, write_scores
from wsi_trainer.slide.augment import Augmented
from wsi_trainer.slide.names import result_names
from wsi_trainer.slide.views import Image

BLOCK = 2048
"""The value of ``--block`` where it is not given."""


class ClassOfPixels(nn.Module):
    """The most likely class of each pixel, and perhaps its probability, as maps of one number for each pixel."""

    def __init__(self, model: SlideSegmenter, probability: bool = False) -> None:
        super().__init__()
        self.model = model
        self.probability = probability

    def forward(self, image: Tensor) -> Tensor:
        logits = self.model(image)
        if not self.probability:
            return logits.argmax(dim=1).to(torch.uint8)
        highest = logits.softmax(dim=1).amax(dim=1)
        # One map, so that it is computed once; two channels, since a plan may cut a map between images.
        return torch.stack([logits.argmax(dim=1).to(highest.dtype), highest], dim=1)


class Regions:
    """A sink for `ClassOfPixels`: hands the classes to the sink of the label image, and collects of each class but the
    first its polygons and their most probable points, box by box.

    Args:
        labels: Takes the classes, (1, height, width).
        classes: How many there are.
        advance: Told of pixels that are written.
    """

    def __init__(self, labels: Sink, classes: int, advance: Callable[[int], None]) -> None:
        self.labels, self.advance = labels, advance
        self.parts: list[list[shapely.Polygon]] = [[] for _ in range(1, classes)]
        self._points: list[list[Points]] = [[np.empty((0, 3))] for _ in self.parts]

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        """Make the label image."""
        self.labels.open((1, *shape[-2:]), torch.uint8, resumes)

    def write(self, box: Box, values: Tensor) -> None:
        """Take the classes of a box, and the probabilities that follow them in the next channel."""
        values = values.flatten(0, -3)
        place, classes = Box(box.lo[-2:], box.hi[-2:]), values[:1].to(torch.uint8)
        self.labels.write(Box((0, *place.lo), (1, *place.hi)), classes)
        found = classes[0].numpy()
        for number, (polygons, best) in enumerate(zip(self.parts, self._points, strict=True), start=1):
            mask = found == number
            polygons += pieces(mask, place.lo)
            if len(values) > 1:
                best.append(highest(mask, values[1].float().numpy(), place))
        self.advance(place.positions)

    def close(self) -> None:
        """Complete the label image."""
        self.labels.close()

    @property
    def points(self) -> list[Points]:
        """Of each class but the first, where it is most probable."""
        return [np.concatenate(best) for best in self._points]


@dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """The options of `wsi-train segment`."""

    block: int = BLOCK
    """Deprecated, and without effect: the budget decides how much of a slide is computed at a time. Version 2 will not
    have it.
    """
    smallest: int = 64
    """Regions of fewer pixels get no outline in the GeoJSON file and are no detections; the label image has them."""
    compare: bool = True
    """Compare the found regions with the drawn ones, where the manifest has the column regions."""
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
            task = self.bar.add_task(record.slide, total=view.shape[2] * view.shape[3])
            return self._write(record, batch["image"], view, partial(self.bar.advance, task))

    def _write(self, record: SlideRecord, image: Any, source: Image, advance: Callable[[int], None]) -> dict[str, Any]:
        name = self.names[record.slide]
        drawn = self._drawn(record, source)
        if drawn is not None and self.options.join and source.resolution is None:
            raise SlideError(
                record.slide,
                "does not say how large its pixels are, which --join needs; fill in the manifest's column mpp",
            )
        question = ClassOfPixels(self.model, probability=drawn is not None)
        classes, store = self.model.pixels.classes, self.folder / f"{name}.ome.zarr"
        labels = SlideSink(store, source, classes)
        found = Regions(labels, len(classes), advance)
        infer(self.predictor.network(question, question.probability), image, found, progress=False)
        regions = [joined(polygons, self.options.smallest) for polygons in found.parts]
        shown = [PathClass.of(its, number) for number, its in enumerate(classes)][1:]
        write_outlines(self.folder / f"{name}.geojson", dict(zip(shown, regions, strict=True)), source.place)
        judged = None
        if drawn is not None:
            own = source.resolution
            pixel = None if own is None else (own.y, own.x)
            judged = judge(labels.array, regions, found.points, drawn, pixel, self.options.tolerance, self.options.join)
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


@limits_imports
def segment(words: Sequence[str]) -> int:
    """Write what a model with a class for each pixel finds on slides."""
    parser = run_parser(
        "segment",
        "Write the predicted class of each pixel of whole slides, box by box: an OME-Zarr label image and GeoJSON "
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
    if chosen.block != BLOCK:
        say(console, "--block has no effect, since the budget decides; version 2 does not have it")
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
