"""Contents of the viewer: slides with their predictions and maps, from a run, or slides alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import MAPS, Run, as_written, read_json
from wsi_trainer.io.arrays import load_array
from wsi_trainer.metrics import read_predictions
from wsi_trainer.preprocess.inputs import list_slides
from wsi_trainer.slide.geometry import SlideTransform

MOST_PIXELS = 1 << 31
"""A side of a slide: one position of a map stands for no more."""


@dataclass(frozen=True)
class MapFile:
    """A map of what a model looked at, as `heatmap` wrote it."""

    path: Path
    title: str
    target: str
    place: SlideTransform
    """Where the image that the model saw lies in level 0 of the slide."""
    stride: int
    """Pixels of that image along one position."""

    def load(self) -> NDArray[np.float32]:
        """The map, left in its file until it is looked at."""
        with as_written(self.path):
            values = load_array(self.path)
            if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
                raise ValueError(f"an array of {values.dtype} and shape {values.shape} is no map")
        return values


@dataclass(frozen=True)
class Opinion:
    """Prediction of a slide."""

    predicted: str
    error: float
    wrong: bool
    probability: float | None = None


@dataclass(frozen=True)
class ShownSlide:
    """A slide of the list."""

    name: str
    path: Path
    mpp: float | None = None
    """From the manifest, which wins over what the file says."""
    label: str = ""
    patient: str = ""
    site: str = ""
    split: str = ""
    opinions: tuple[Opinion | None, ...] = ()
    """Of each run."""
    maps: tuple[MapFile, ...] = ()
    regions: Path | None = None
    """Annotations of the slide."""

    def row(self, number: int) -> dict[str, Any]:
        """Row of the page's list. The page needs no path."""
        said = [None if one is None else vars(one) for one in self.opinions]
        facts = {key: getattr(self, key) for key in ("name", "label", "patient", "site", "split")}
        return {"number": number, **facts, "opinions": said, "maps": len(self.maps)}


@dataclass(frozen=True)
class Contents:
    """Everything that may be looked at; nothing else is read."""

    title: str
    slides: tuple[ShownSlide, ...]
    runs: tuple[str, ...] = ()
    """The names of the runs that are compared."""
    error_means: str = ""
    notes: tuple[str, ...] = field(default=())


def contents_of(
    what: Path,
    compare: Path | None = None,
    regions: Path | None = None,
    name: str | None = None,
    data_root: Path | None = None,
) -> Contents:
    """Contents of a run, a slide, a store, a folder of slides or a manifest."""
    if regions is not None and not regions.is_dir():
        raise UserError(f"--regions: there is no folder {regions}; it holds SLIDE.geojson for each annotated slide")
    if (what / "cross_validation.json").is_file():
        raise UserError(f"{what} holds a run for each fold; look at one of them, such as {what / 'fold0'}")
    if Run(what).config.is_file():
        others = [] if compare is None else [Run.open(compare, cohort=name)]
        found = of_runs([Run.open(what, cohort=name, data_root=data_root), *others])
    elif compare is not None or name is not None:
        option = "--name" if compare is None else "--compare"
        raise UserError(f"{option} is about runs, and {what} is not the folder of a run")
    else:
        found = of_slides(what)
    slides = (replace(slide, regions=annotations_of(slide.name, regions)) for slide in found.slides)
    return replace(found, slides=tuple(slides))


def of_slides(what: Path) -> Contents:
    """Slides about which nothing is known but their files."""
    notes: list[str] = []
    listed = list_slides(str(what), note=notes.append)
    slides = tuple(
        ShownSlide(
            name=one.job.name,
            path=one.job.slide,
            mpp=one.job.mpp,
            label=one.columns.get("label", ""),
            patient=one.columns.get("patient", ""),
            site=one.columns.get("site", ""),
            split=one.columns.get("split", ""),
        )
        for one in listed
    )
    return Contents(what.resolve().name, slides, notes=tuple(notes))


def of_runs(folders: list[Run]) -> Contents:
    """The slides of the first run's splits, worst mistakes first, with what all of the runs say of them."""
    names = tuple(folder.name for folder in folders)
    if len(set(names)) < len(names):
        names = tuple(str(folder.path) for folder in folders)
    records = folders[0].kept()
    said = [opinions_of(folder) for folder in folders]
    maps = [
        maps_of(folder, maps, name if len(folders) > 1 else "")
        for folder, name in zip(folders, names)
        for maps in folder.mapped
    ]
    slides = [
        _shown(
            record,
            tuple(one.get(record.slide, one.get(record.patient)) for _, one in said),  # or of the patient
            tuple(found[record.slide] for found in maps if record.slide in found),
            next((labels[record.slide] for labels, _ in said if record.slide in labels), record.label),
        )
        for record in records
    ]
    slides.sort(key=lambda slide: -slide.opinions[0].error if slide.opinions[0] else np.inf)
    return Contents(names[0], tuple(slides), names, error_means(folders[0]))


def _shown(
    record: SlideRecord, opinions: tuple[Opinion | None, ...], maps: tuple[MapFile, ...], label: str
) -> ShownSlide:
    return ShownSlide(
        record.slide, record.path, record.mpp, label, record.patient, record.site, record.split, opinions, maps
    )


def predictions_of(folder: Run) -> list[Path]:
    """The files of predictions of a run, one for each split."""
    return sorted(folder.predictions("any").parent.glob("*.csv"))


def opinions_of(folder: Run) -> tuple[dict[str, str], dict[str, Opinion]]:
    """The labels of slides as they were predicted against, and what the run says of them."""
    labels: dict[str, str] = {}
    opinions: dict[str, Opinion] = {}
    for path in predictions_of(folder):
        predictions = read_predictions(path)
        for index, (slide, error) in enumerate(zip(predictions.slides, predictions.errors())):
            said = predictions.words(index)
            labels[slide] = said.label
            opinions[slide] = Opinion(said.predicted, float(error), said.wrong, said.probability)
    return labels, opinions


def error_means(folder: Run) -> str:
    """The meaning of a slide's error; empty where nothing was predicted."""
    for path in predictions_of(folder):
        return read_predictions(path).of_slide.ERROR
    return ""


def maps_of(folder: Run, maps: Path, run: str = "") -> dict[str, MapFile]:
    """The maps of a method by slide. One outside of the run is refused: a run may come from somebody else."""
    about = maps / MAPS
    with as_written(about):
        facts = read_json(about)
        entries = {str(slide): dict(entry) for slide, entry in dict(facts.get("slides", {})).items()}
        target, method = str(facts.get("class", "")), str(facts.get("method", ""))
        found = {}
        for slide, entry in entries.items():
            path = maps / str(entry["array"])
            if not path.resolve().is_relative_to(folder.path.resolve()):
                raise UserError(f"{about} names a map outside of the run: {path}; make the maps again")
            title = ": ".join(part for part in (run, f"{method}, {target}") if part)
            found[slide] = MapFile(path, title, target, SlideTransform.of(entry["place"]), _pixels(entry["stride"]))
    return found


def _pixels(value: Any) -> int:
    """A number of pixels as a file says it: positions of the slide are multiplied with it, and divided by it."""
    found = int(value)
    if not 1 <= found <= MOST_PIXELS:
        raise ValueError(f"{str(value)[:40]} is no number of pixels")
    return found


def annotations_of(slide: str, folder: Path | None) -> Path | None:
    """The file with the annotations of a slide, named as for `heatmap --regions`."""
    path = None if folder is None else folder / f"{Path(slide).stem}.geojson"
    return path if path is not None and path.is_file() else None
