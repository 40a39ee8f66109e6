"""The command `segment`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.explain.heatmaps import budget_of, device_of
from wsi_trainer.fit.config import limits_imports, open_run, run_parser
from wsi_trainer.fit.evaluate import add_overwrite, name_of, records_in
from wsi_trainer.fit.trainer import at_work
from wsi_trainer.io.display import say
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import Interval
from wsi_trainer.models import SlideSegmenter
from wsi_trainer.segment.predict import SegmentOptions, Segments
from wsi_trainer.segment.scores import write_scores


@limits_imports
def segment(words: Sequence[str]) -> int:
    """Write what a model with a class for each pixel finds on slides."""
    parser = run_parser(
        "segment",
        "Write the predicted class of each pixel of whole slides, block by block: an OME-Zarr label image and GeoJSON "
        "outlines for QuPath, in pixels of the slide, in the folder segments of the run. For runs of SegmentationTask. "
        "Where the manifest has the column regions, what is found is also compared with what is drawn, with 95 % "
        "intervals by patient (scores.json, borders.csv, lesions.csv): F1 of borders within --tolerance micrometres, "
        "and FROC, the share of lesions that is detected at 1/4 to 8 false positives for each slide, where a found "
        "region stands for its most probable point. `wsi-train report` then shows them.",
    )
    parser.add_argument("--split", type=str, default="test", help="which slides of the run: train, val or test")
    parser.add_argument("--slides", type=Path, default=None, help="a manifest of other slides, instead of a split")
    parser.add_argument(
        "--name", type=str, default=None, help="the name of these slides, or of a cohort that was tested"
    )
    add_overwrite(parser)
    parser.add_class_arguments(SegmentOptions)
    run, options = open_run(parser, words)
    chosen = SegmentOptions(**{field.name: getattr(options, field.name) for field in fields(SegmentOptions)})
    if options.slides is not None:
        records = run.as_seen(records_in(run, options.slides, labelled=False))
        run = run.of_cohort(options.name or name_of(options.slides))
    run.keep(run.segments / "segments.json", options.overwrite)
    model, data, config = run.loaded
    if not isinstance(model, SlideSegmenter):
        raise UserError(f"{type(model.task).__name__} has one prediction for a slide; segment is for SegmentationTask")
    if options.slides is None:
        records = run.slides(options.split)
    model.to(device_of(config))
    out = run.segments
    classes, segments = list(model.task.classes), Segments(model, data, out, chosen, budget_of(config, model.device))
    with at_work(run.path):
        segments.write(records)
    write_json(out / "segments.json", {"classes": classes, "slides": segments.found, "skipped": segments.skipped})
    facts = {"split": "" if options.slides else options.split, "tolerance": chosen.tolerance, "join": chosen.join}
    scores = write_scores(out, records, segments.judged, classes, facts, config.resamples)
    console = Console()
    say(console, f"{len(segments.found)} slides: {out}")
    for line in sentences_on(scores):
        say(console, line)
    for slide, reason in segments.skipped.items():
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
