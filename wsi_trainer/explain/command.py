"""The command `heatmap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import folder_of
from wsi_trainer.explain.heatmaps import write_heatmaps
from wsi_trainer.explain.outputs import sentence_on_regions
from wsi_trainer.explain.slide_map import MapOptions
from wsi_trainer.fit.config import limits_imports, open_run, run_parser
from wsi_trainer.fit.evaluate import add_overwrite
from wsi_trainer.fit.run import MAPS
from wsi_trainer.fit.trainer import at_work
from wsi_trainer.io.display import say
from wsi_trainer.models import SlideClassifier


@limits_imports
def heatmap(words: Sequence[str]) -> int:
    """Write maps of what the model looked at."""
    parser = run_parser(
        "heatmap",
        "Write whole-slide maps of how much each position speaks for a class, tile by tile: OME-Zarr layers, a PNG "
        "overlay, GeoJSON outlines and tiles for QuPath, DICOM results and the top regions of each slide, in the "
        "folder heatmaps/METHOD of the run (heatmaps/METHOD-TARGET for a --target that is not the default). All "
        "places are in pixels of level 0 of the original slides, also where they were converted with --mpp or --crop. "
        "Its script qupath.groovy loads all into a QuPath project.",
    )
    parser.add_argument(
        "--name", type=str, default=None, help="the cohort that was tested, instead of the run's slides"
    )
    add_overwrite(parser)
    parser.add_argument("--split", type=str, default="test", help="which slides: train, val or test")
    parser.add_argument(
        "--regions",
        type=Path,
        default=None,
        help="folder with SLIDE.geojson, the true regions in pixels of the original slides",
    )
    parser.add_class_arguments(MapOptions)
    run, options = open_run(parser, words)
    model, data, _ = run.loaded
    if not isinstance(model, SlideClassifier):
        raise UserError(
            "a heat map is for one prediction of a slide; `wsi-train segment` writes the class of each pixel"
        )
    if data.features is not None:
        raise UserError("a heat map needs the slides, and data.features reads what was made of their patches")
    if data.group == "patient":
        raise UserError(
            "a heat map is of one slide, and data.group is patient; --data.group slide maps each slide by itself"
        )
    maps = MapOptions(**{field.name: getattr(options, field.name) for field in fields(MapOptions)})
    folder = run.maps(folder_of(model.task, maps.method, maps.target))
    run.keep(folder / MAPS, options.overwrite)
    with at_work(run.path):
        facts = write_heatmaps(run, options.split, maps, options.regions)
    console = Console()
    say(console, f"{len(facts['slides'])} maps: {folder}")
    if sentence := sentence_on_regions(facts):
        say(console, sentence)
    for slide, entry in facts["slides"].items():
        if "no_dicom" in entry:
            say(console, f"no DICOM: {slide}: {entry['no_dicom']}")
    for slide, reason in facts["skipped"].items():
        say(console, f"left out: {slide}: {reason}")
    return 0
