"""Contents of the viewer: slides with their predictions and maps, from a run, or slides alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.errors import UserError
from wsi_trainer.explain.maps import LabelFile, MapFile, Maps, annotations_on, labels_of, outlines_of
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.metrics import Predictions, read_predictions
from wsi_trainer.preprocess.inputs import list_slides
from wsi_trainer.slide.names import file_about


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
    maps: tuple[MapFile | LabelFile, ...] = ()
    """Maps and label images, run by run."""
    regions: Path | None = None
    """Annotations of the slide."""
    found: Path | None = None
    """Regions that the first run found."""

    def row(self, number: int) -> dict[str, Any]:
        """Row of the page's list. The page needs no path."""
        said = [None if one is None else vars(one) for one in self.opinions]
        facts = {key: getattr(self, key) for key in ("name", "label", "patient", "site", "split")}
        return {"number": number, **facts, "opinions": said}


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
    checkpoint: str = "best",
) -> Contents:
    """Contents of a run, a deployment, a slide, a store, a folder of slides or a manifest."""
    if regions is not None and not regions.is_dir():
        raise UserError(f"--regions: there is no folder {regions}; it holds SLIDE.geojson for each annotated slide")
    if (study := Study.at(what)) is not None:
        raise study.refuse()
    if (deployment := Deployment.at(what, data_root)) is not None:
        deployment.refuse(compare=compare, name=name, checkpoint=checkpoint != "best")
        found = of_deployment(deployment)
    elif Run(what).config.is_file():
        others = [] if compare is None else [Run.at(compare, name)]
        found = of_runs([Run.open(what, checkpoint, name, data_root), *others])
    elif compare is not None or name is not None:
        option = "--name" if compare is None else "--compare"
        raise UserError(f"{option} is about runs, and {what} is not the folder of a run")
    else:
        found = of_slides(what)
    slides = (replace(slide, regions=annotations_of(slide, regions) or slide.regions) for slide in found.slides)
    return replace(found, slides=tuple(slides))


def of_slides(what: Path) -> Contents:
    """Slides about which nothing is known but their files and the manifest's cells."""
    notes: list[str] = []
    slides = []
    for one in list_slides(str(what), note=notes.append):
        label, patient, site, split = (one.columns.get(name, "") for name in ("label", "patient", "site", "split"))
        slides.append(ShownSlide(one.job.name, one.job.slide, one.job.mpp, label, patient, site, split))
    return Contents(what.resolve().name, tuple(slides), notes=tuple(notes))


def of_runs(folders: list[Run]) -> Contents:
    """The slides of the first run's splits, worst mistakes first, with the predictions and maps of all runs."""
    names = tuple(folder.name for folder in folders)
    if len(set(names)) < len(names):
        names = tuple(str(folder.path) for folder in folders)
    return _contents(folders, names, names, [_predictions_of(folder) for folder in folders])


def of_deployment(deployment: Deployment) -> Contents:
    """The slides of a deployment, worst mistakes first, with its predictions and the maps of its members."""
    name, labelled = str(deployment.facts["name"]), deployment.labelled()
    members = deployment.members
    return _contents(list(members.values()), tuple(members), (name,), [[] if labelled is None else [labelled]])


def _contents(
    folders: list[Run], called: tuple[str, ...], names: tuple[str, ...], predictions: list[list[Predictions]]
) -> Contents:
    """The slides of the first run, worst mistakes first.

    Args:
        folders: The runs, whose maps are shown.
        called: What they are called.
        names: Those who predict: the runs, or their ensemble.
        predictions: Of each of these.
    """
    said = [_opinions_of(files) for files in predictions]
    outlines = outlines_of(folders[0])
    titles = called if len(folders) > 1 else ("",) * len(folders)
    layers: list[tuple[int, Mapping[str, MapFile | LabelFile]]] = []
    for place, (folder, title) in enumerate(zip(folders, titles, strict=True)):
        layers += [(place, maps.arrays(title)) for maps in Maps.of(folder)]
        layers.append((place, labels_of(folder, title)))
    slides = [
        ShownSlide(
            one.slide,
            one.path,
            one.mpp,
            next((labels[one.slide] for labels, _ in said if one.slide in labels), one.label),
            one.patient,
            one.site,
            one.split,
            tuple(opinions.get(one.slide, opinions.get(one.patient)) for _, opinions in said),  # or of the patient
            tuple(replace(found[one.slide], run=place) for place, found in layers if one.slide in found),
            annotations_on(one),
            outlines.get(one.slide),
        )
        for one in folders[0].kept()
    ]
    slides.sort(key=lambda slide: -slide.opinions[0].error if slide.opinions[0] else np.inf)
    error_means = predictions[0][0].error_means if predictions[0] else ""
    notes = tuple(outdated for folder in folders if (outdated := folder.outdated))
    return Contents(names[0], tuple(slides), names, error_means, notes)


def _predictions_of(folder: Run) -> list[Predictions]:
    """The predictions of a run, of one split after another."""
    return [read_predictions(path) for path in sorted(folder.predictions_file("any").parent.glob("*.csv"))]


def _opinions_of(files: list[Predictions]) -> tuple[dict[str, str], dict[str, Opinion]]:
    """By slide the label that it was predicted against, and the prediction."""
    labels: dict[str, str] = {}
    opinions: dict[str, Opinion] = {}
    for predictions in files:
        for index, (slide, error) in enumerate(zip(predictions.slides, predictions.errors())):
            said = predictions.words(index)
            if all(part.OF_PIXELS for part in predictions.by_target.values()):  # a label is a share, and no name
                said = replace(said, predicted=f"{said.predicted}, drawn {said.label}")
            else:
                labels[slide] = said.label
            opinions[slide] = Opinion(said.predicted, float(error), said.wrong, said.probability)
    return labels, opinions


def annotations_of(slide: ShownSlide, folder: Path | None) -> Path | None:
    """The file with the annotations of a slide, named as for `heatmap --regions`."""
    found = None if folder is None else file_about(folder, (slide.name, slide.path))
    return None if found is None else found[1]
