"""The command `heatmap`: maps of all slides of a split, and the share that falls on annotated regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from rich.console import Console
from rich.progress import track

from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import folder_of, index_of, label_of, receptive_field, targets_of
from wsi_trainer.explain.dicom import need_highdicom, results_as_dicom
from wsi_trainer.explain.laid_patches import LaidPatches
from wsi_trainer.explain.outputs import sentence_on_regions, write_script
from wsi_trainer.explain.slide_map import MapFiles, MapOptions, SlideMap
from wsi_trainer.explain.tables import kinds_of
from wsi_trainer.fit.opening import fields_of, open_run, run_parser
from wsi_trainer.fit.result import LESION_SCORES, LESIONS, Result, Work
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.scoring import write_lesions
from wsi_trainer.fit.trainer import at_work
from wsi_trainer.io.display import say
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import MISSED, Marks
from wsi_trainer.models import FrozenFeatures, PatchEncoder, SlideClassifier
from wsi_trainer.models.allowed import limits_imports
from wsi_trainer.preprocess.stores import Originals
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.regions.outlines import Region, check_on_slide, read_regions
from wsi_trainer.regions.shapes import Outline, Rings, hits, regions_joined
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.names import file_about, result_names
from wsi_trainer.slide.views import Bag, Image, View


def is_known(record: SlideRecord, regions: Sequence[Rings], target: str, classes: Sequence[str]) -> bool:
    """True where all lesions of a slide are drawn: some are, or its label says that it has none."""
    return bool(regions) or (record.label in classes and record.label != target)


def marks_of(found: Sequence[Outline], regions: Sequence[Rings], stride: int) -> Marks:
    """Lesions that outlines detect: the position with the largest value of an outline meets them.

    Args:
        found: The outlines of a map.
        regions: Drawn regions in pixels of the image; those that overlap are one lesion.
        stride: Pixels of the image for one position.
    """
    x, y = np.array([one.at for one in found]).reshape(-1, 2).T
    values = np.array([one.largest for one in found])
    reach = stride / 2
    squares = shapely.box(x - reach, y - reach, x + reach, y + reach)
    scores, outside = hits(regions_joined(regions), squares, values, MISSED)
    return Marks(scores, values[outside])


def write_detected(
    folder: Path, records: Sequence[SlideRecord], marks: Mapping[str, Marks], target: str, split: str, resamples: int
) -> None:
    """Write lesions.csv and scores.json of the slides on which all lesions are known; those of earlier maps go."""
    for name in (LESIONS, LESION_SCORES):
        (folder / name).unlink(missing_ok=True)
    known = [record for record in records if record.slide in marks]
    if any(len(marks[record.slide].lesions) for record in known):
        found = write_lesions(folder, known, [(marks[record.slide],) for record in known], [target], resamples)
        write_json(folder / LESION_SCORES, {"split": split, "lesions": found})


def write_heatmaps(
    run: Run,
    split: str = "test",
    options: MapOptions | None = None,
    regions: Path | None = None,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Write the map of each slide of the split, tile by tile; returns the content of heatmaps.json of its folder.

    Args:
        run: The run, or one of its cohorts, which gets the maps.
        split: Which slides.
        options: What is mapped and written.
        regions: Folder with SLIDE.geojson, the true regions in pixels of level 0 of the original slides; without it
            shares are not computed.
        overwrite: Whether to replace maps of an earlier command.
    """
    model = run.loaded.model
    assert isinstance(model, SlideClassifier)
    options = options or MapOptions()
    if options.dicom:
        need_highdicom()
    if run.loaded.data.features is not None and options.method in ("gradient", "integrated"):
        raise UserError(
            f"--method is {options.method}, which is of pixels, and the run reads features; choose activation, or "
            "attention where the head has it"
        )
    if options.tables != "none" and not isinstance(model.backbone, PatchEncoder | FrozenFeatures):
        raise UserError(
            f"--tables is {options.tables}, and model.backbone {type(model.backbone).__name__} takes no patches that a "
            "table could be of; leave it out"
        )
    target, originals = index_of(model.task, options.target), Originals(options.originals)
    records = [
        replace(record, label=label_of(model.task, target, record.cells))
        for record in run.records(split, model.task.columns, features=run.loaded.data.features)
    ]
    result = result_of(run, model, options, split)
    with result.locked(overwrite):
        work = run.work(result, records, {**asdict(options), "regions": regions}, overwrite)
        maps = Maps(run, work, records, options, target, originals, regions)
        skipped = work.each(track(records, description="maps", transient=True), maps.write, run.loaded.data.on_error)
        facts = {"split": split, "checkpoint": run.checkpoint_name, **maps.finish(), "skipped": skipped}
        write_json(result.file, facts)
        run.finish(work)
    return facts


class Maps:
    """Writer of the maps of slides."""

    def __init__(
        self, run: Run, work: Work, records: Sequence[SlideRecord], options: MapOptions, target: int,
        originals: Originals, regions: Path | None,
    ) -> None:  # fmt: skip
        """Write maps into the folder of a result.

        Args:
            run: The run.
            work: The result, and the slides of which it has the maps already.
            records: All slides.
            options: What is mapped and written.
            target: Index of the class.
            originals: The slides that stores were made of.
            regions: Folder with the true regions.
        """
        model, data, config = run.loaded
        self.run, self.work, self.options, self.originals, self.regions = run, work, options, originals, regions
        self.records, self.names = records, result_names([record.slide for record in records])
        self.folder, self.patches, self.resamples = work.result.folder, data.patches, config.resamples
        self.target, self.classes = target, targets_of(model.task)
        self.shown_as = PathClass.of(self.classes[target], target)
        self.field = 0 if data.features else data.patches.size if data.patches else receptive_field(model.backbone)

    def write(self, record: SlideRecord) -> dict[str, Any]:
        """Write the map of a slide; returns all that the end needs of it."""
        options, predictor = self.options, self.run.predictor
        with predictor.opened(record) as (batch, view), ExitStack() as stack:
            attribution = predictor.attribute(batch, self.target, options.method, options.steps)
            values = attribution.values.cpu()
            image: View | None = view
            laid, best, covered, field = None, None, None, self.field
            if isinstance(view, FeatureSource):
                slide = stack.enter_context(record.open()) if record.path.exists() else None
                laid, image = LaidPatches.of_features(view, record, slide)
                best, covered, field = laid.best(values, options.top), laid.covered, laid.side
            elif isinstance(view, Bag):
                assert self.patches is not None
                laid, image = LaidPatches.of_bag(view, self.patches), view.whole()
            if laid is not None:
                attribution = replace(laid.paint(values), peak_bytes=attribution.peak_bytes)
            shown = image if laid is None else laid
            assert isinstance(shown, Image | LaidPatches) and (image is None or isinstance(image, Image))
            one = SlideMap(self.folder, record, shown.size, shown.place, attribution.stride, self.names[record.slide])
            files = one.write(attribution.values, image, options, self.shown_as, best, covered)
            if kinds := kinds_of(options.tables):
                (said,) = predictor.predict_all([record])
                table = predictor.patches(batch, view, said.to_dict(), options.target, one.place.mpp)
                files.entry["tables"] = one.write_tables(table, kinds)
        drawn = one.in_image(_regions_of(record, self.regions, one.place.shape))
        known = self.regions is not None and is_known(record, drawn, self.shown_as.name, self.classes)
        marks = marks_of(files.outlines, drawn, one.stride) if known else None
        original = _of_original(one, files, self.originals, self.shown_as, options)
        if image is None:
            original["no_pixels"] = f"the slide is not at {record.path}"
        return {
            "entry": files.entry | {"peak_bytes": attribution.peak_bytes} | original,
            "size": one.size,
            "field": field,
            "largest": float(attribution.positive.max()),
            "marks": None if marks is None else [marks.lesions.tolist(), marks.false.tolist()],
        }

    def finish(self) -> dict[str, Any]:
        """Write what all maps say together: colours of one scale, and lesions; returns facts for heatmaps.json."""
        made = self.work.finished(self.records)
        scale = max((one["largest"] for _, one in made), default=0.0) if self.options.method != "attention" else None
        field = max((one["field"] for _, one in made), default=self.field)
        entries: dict[str, dict[str, Any]] = {}
        found: dict[str, Marks] = {}
        for record, one in made:
            entry, size, name = dict(one["entry"]), tuple(one["size"]), self.names[record.slide]
            place = SlideTransform.of(entry["place"])
            drawn = _regions_of(record, self.regions, place.shape)
            written = SlideMap(self.folder, record, size, place, entry["stride"], name)
            entries[record.slide] = entry | written.overlay(scale, drawn, one["field"])
            if one["marks"] is not None:
                found[record.slide] = Marks(*(np.array(values, np.float64) for values in one["marks"]))
        target = self.shown_as.name
        write_detected(self.folder, self.records, found, target, self.work.result.split, self.resamples)
        write_script(self.folder)
        facts = {"class": target, "method": self.options.method, "receptive_field": field}
        shares = shares_of([entries[record.slide] for record, _ in made if record.label == target])
        return facts | shares | {"slides": entries}


def shares_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of the maps inside of drawn regions: the means over slides of the class, and how many these are."""
    # A map of which nothing speaks for the class has no share of it anywhere.
    found = [entry for entry in entries if np.isfinite(entry.get("mass_inside", np.nan))]
    keys = ("mass_inside", "area_inside") if found else ()
    return {"annotated_slides": len(found)} | {key: float(np.mean([one[key] for one in found])) for key in keys}


def result_of(run: Run, model: SlideClassifier, options: MapOptions, split: str) -> Result:
    """The place of the maps of a method and a target."""
    return run.result("heatmap", split, folder_of(model.task, options.method, options.target))


def _of_original(
    one: SlideMap, files: MapFiles, originals: Originals, target: PathClass, options: MapOptions
) -> dict[str, Any]:
    """Path of the original slide, and the results that refer to it."""
    original = originals.of(one.record.path)
    dicom = results_as_dicom(one, files, original, target, options) if options.dicom else {}
    return {"original": None if original is None else str(original.resolve()), **dicom}


def _regions_of(record: SlideRecord, folder: Path | None, shape: tuple[int, int]) -> list[Region]:
    """The drawn regions of a slide of this height and width."""
    if folder is None:
        return []
    file = file_about(folder, record.called)
    if file is None:
        return []
    found = read_regions(file[1])
    check_on_slide(found, shape, file[1])
    return found


@limits_imports
def heatmap(words: Sequence[str]) -> int:
    """Write maps of what the model looked at."""
    parser = run_parser(
        "heatmap",
        "Write whole-slide maps of how much each position speaks for a class, tile by tile: OME-Zarr layers, a PNG "
        "overlay, GeoJSON outlines and tiles for QuPath, DICOM results and the top regions of each slide, in the "
        "folder heatmaps/METHOD of the run (heatmaps/METHOD-TARGET for a --target that is not the default, "
        "heatmaps/SPLIT/METHOD for a --split that is not test). All "
        "places are in pixels of level 0 of the original slides, also where they were converted with --mpp or --crop. "
        "Its script qupath.groovy loads all into a QuPath project.",
    )
    parser.add_argument(
        "--name", type=str, default=None, help="the cohort that was tested, instead of the run's slides"
    )
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
    if data.group == "patient":
        raise UserError(
            "a heat map is of one slide, and data.group is patient; --data.group slide maps each slide by itself"
        )
    maps = fields_of(MapOptions, options)
    result = result_of(run, model, maps, options.split)
    result.keep(options.overwrite)
    with at_work(run.writable):
        facts = write_heatmaps(run, options.split, maps, options.regions, options.overwrite)
    console = Console()
    say(console, f"{len(facts['slides'])} maps: {result.folder}")
    if sentence := sentence_on_regions(facts):
        say(console, sentence)
    for slide, entry in facts["slides"].items():
        if "no_pixels" in entry:
            say(console, f"no pictures of patches: {slide}: {entry['no_pixels']}; --data-root finds moved slides")
        if "no_dicom" in entry:
            say(console, f"no DICOM: {slide}: {entry['no_dicom']}")
    for slide, reason in facts["skipped"].items():
        say(console, f"left out: {slide}: {reason}")
    return 0
