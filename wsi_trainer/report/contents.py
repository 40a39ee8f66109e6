"""Contents of a report, gathered from the folder of a run and that of its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsi_trainer.data.covariates import Covariates
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.explain.maps import Maps, Segmented, annotations_on
from wsi_trainer.fit.folder import Curves
from wsi_trainer.fit.result import LESIONS, read_lesion_scores
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.files import as_written, read_json
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.metrics import (
    Interval,
    LesionPredictions,
    Predictions,
    Words,
    delong_difference,
    kinds_of,
    paired_difference,
    read_predictions,
)
from wsi_trainer.metrics.operating import binary_targets
from wsi_trainer.slide.names import same_patient

FEW = 100
"""Patients of training below which that is said."""


@dataclass(frozen=True)
class Regions:
    """Comparison of the found regions of a split with the drawn ones."""

    name: str
    """Of the run."""
    scores: dict[str, Any]
    lesions: LesionPredictions

    @staticmethod
    def load(name: str, folder: Run, split: str) -> Regions | None:
        """The comparison of a run, or of its maps; None where it has none of the split."""
        for place in (one.folder for one in folder.found if one.kind in ("segment", "heatmap")):
            if scores := read_lesion_scores(place, split):
                return Regions(name, scores, LesionPredictions.read(place / LESIONS))
        return None

    def tables(self) -> list[tuple[str, Any]]:
        """Captions, and scores with their intervals by class."""
        found = []
        if "borders" in self.scores:
            caption = f"Borders by class, within {self.scores['tolerance']:g} µm"
            found.append((caption, self.scores["borders"]["per_class"]))
        caption = "Lesions detected by class, as a share of all, at 1/4 to 8 false positives for each slide"
        return [*found, (caption, self.scores["lesions"]["per_class"])]


@dataclass(frozen=True)
class RunResults:
    """One run as the report needs it."""

    name: str
    folder: Run
    predictions: Predictions
    scores: dict[str, Any]
    curves: Curves
    memory: dict[str, Any]
    records: dict[str, SlideRecord]
    """The slides; that of a patient is the first of its slides."""
    maps: list[Maps]
    regions: Regions | None = None
    """Comparison of its regions with the drawn ones, where it has any."""
    study: Study | None = None
    """The folds of a cross-validation."""
    folds: dict[str, Any] | None = None
    """The scores of each of these, their mean and spread."""

    @staticmethod
    def load(name: str, folder: Run, split: str) -> RunResults:
        """Read a run that was tested on the split, or a cross-validation, of which the split is what folds hold out."""
        if (study := Study.at(folder.path)) is not None:
            return _of_folds(name, folder, study)
        folder.existing()
        if folder.cohort is not None and not folder.predictions_file(split).is_file():
            raise UserError(
                f"the cohort {folder.cohort} has no scores, which a report is about: `wsi-train test {folder.path} "
                f"--cohort MANIFEST.csv --name {folder.cohort}` scores slides with labels. `wsi-train view "
                f"{folder.path} --name {folder.cohort}` shows slides without"
            )
        records = _records(folder)
        own = {record.slide for record in records.values() if record.split == split}
        return RunResults(
            name,
            folder,
            read_predictions(folder.predictions_file(split)),
            read_json(folder.evaluation(split)),
            folder.curves,
            read_json(folder.memory),
            records,
            [maps for maps in Maps.of(folder) if own & maps.slides],
            Regions.load(name, folder, split),
        )


def _of_folds(name: str, folder: Run, study: Study) -> RunResults:
    with as_written(study.results):
        facts, predictions = study.scores, study.pooled
        scores = {"slide": facts["pooled"], "patients": len(set(predictions.patients))}
        scores |= {"patient": facts["patient"]["pooled"]} if "patient" in facts else {}
        scores |= {key: facts[key] for key in ("operating_points", "survival") if key in facts}
    first = next(iter(study.runs.values()))
    memory, records = read_json(first.memory), _records(first)
    return RunResults(name, folder, predictions, scores, {}, memory, records, [], study=study, folds=facts)


@dataclass(frozen=True)
class SlideRow:
    """One line of the table of slides."""

    slide: str
    path: Path
    patient: str
    site: str
    words: Words
    error: float
    """See `Predictions.errors`."""
    baseline: float | None
    """The error of the baseline on this slide."""
    maps: dict[str, Path]
    """The pictures of the maps of both runs, by the folder of each."""
    drawn: Path | None
    """Outlines of drawn regions."""
    found: dict[str, Segmented]
    """What `segment` found by either run, by what a reader calls it."""


def slide_rows(run: RunResults, baseline: RunResults | None) -> list[SlideRow]:
    """The slides, those that are decided wrongly first, each part by its error."""
    errors = run.predictions.errors()
    other = {} if baseline is None else dict(zip(baseline.predictions.slides, baseline.predictions.errors()))
    pictures: dict[str, dict[str, Path]] = {}
    found: dict[str, dict[str, Segmented]] = {}
    for one in (run, *([] if baseline is None else [baseline])):
        for maps in one.maps:
            pictures.setdefault(called(one, run, maps.folder.name), {}).update(maps.pictures())
        found[called(one, run, "regions")] = Segmented.of(one.folder) if one.study is None else {}
    rows = []
    for index, slide in enumerate(run.predictions.slides):
        record = _record_of(run.records, slide, run.folder)
        rows.append(
            SlideRow(
                slide=slide,
                path=record.path,
                patient=run.predictions.patients[index],
                site=run.predictions.sites[index] if run.predictions.sites else "",
                words=run.predictions.words(index),
                error=float(errors[index]),
                baseline=float(other[slide]) if slide in other else None,
                maps={method: its[slide] for method, its in pictures.items() if slide in its},
                drawn=annotations_on(record),
                found={name: its[slide] for name, its in found.items() if slide in its},
            )
        )
    return sorted(rows, key=lambda row: (row.words.wrong, row.error), reverse=True)


def called(one: RunResults, run: RunResults, what: str) -> str:
    """The name of a result of the run, or of its baseline, whose name stands before."""
    return what if one is run else f"{one.name}, {what}"


def _record_of(records: Mapping[str, SlideRecord], slide: str, folder: Run) -> SlideRecord:
    if slide not in records:
        raise UserError(
            f"{folder.splits} has no slide {slide}, which was predicted: another program wrote one of the two; write "
            f"the predictions again with `wsi-train test {folder.path} --overwrite`"
        )
    return records[slide]


def _records(folder: Run) -> dict[str, SlideRecord]:
    """The slides, whatever the columns of their labels; that of a patient is the first of its slides."""
    records = folder.kept()
    return {record.patient: record for record in reversed(records)} | {record.slide: record for record in records}


def first_of(run: RunResults) -> Run:
    """The run, or that of the first fold, which is on the same machine as the others."""
    return run.folder if run.study is None else next(iter(run.study.runs.values()))


def covariates_in(folder: Run) -> Covariates:
    """The columns that the model of a run takes beside the slide."""
    with as_written(folder.config):
        return Covariates.of((read_yaml(folder.config).get("model") or {}).get("covariates"))


def covariates_of(run: RunResults) -> tuple[list[str], list[list[str]]]:
    """The columns that the model takes beside the slide: the names of splits, and rows with a cell for each.

    A cross-validation is shown as its first fold has it.
    """
    folder = first_of(run)
    if not (covariates := covariates_in(folder)):
        return [], []
    trained = replace(folder, cohort=None).by_split.get("train", [])
    splits = {"train": trained, **folder.by_split}
    if folder.cohort is not None:
        splits = {"train": trained, folder.cohort: folder.kept()}
    return list(splits), covariates.spread(splits)


def limits_of(run: RunResults, baseline: RunResults | None, split: str) -> list[str]:
    """Sentences on what the numbers of a page do not say."""
    records = list(first_of(run).kept())
    sites = sorted({record.site for record in records if record.site})
    trained = {same_patient(one.patient) for one in replace(first_of(run), cohort=None).by_split.get("train", [])}
    lines = []
    if run.folder.cohort is not None:
        lines.append(f"They are of the cohort {run.folder.cohort}, and of no other hospital.")
    elif len(sites) > 1:
        lines.append(f"Slides are from {len(sites)} sites, which training has seen unless they were split by site.")
    else:
        where = f"all from {sites[0]}" if sites else "of unknown sites"
        lines.append(
            f"Slides are {where}, as those of training: `wsi-train deploy` says how it is in another hospital."
        )
    if split == "val" and run.folds is None:
        lines.append("These slides chose the checkpoint and the threshold: the scores are better than on new ones.")
    if run.folds is not None:
        lines.append("Each fold is another model: the scores are of the way of training, and not of one of them.")
    elif baseline is None:
        lines.append("They are of one training; another seed gives other numbers, which no interval here counts.")
    else:
        lines.append(
            "Each side was trained once: a further seed may change their difference, which no interval counts."
        )
    few = [name for name, one in run.scores["slide"].items() if one.get("absent") and "needed" in one["absent"]]
    if few:
        lines.append(f"There are too few patients for intervals of {', '.join(few)}.")
    own = sum(not one.get("absent") for level in ("slide", "patient") for one in run.scores.get(level, {}).values())
    if own > 1:
        lines.append(f"{own} intervals of scores are shown, none adjusted for their number.")
    if len(trained) < FEW:
        lines.append(f"{len(trained)} patients were trained on: more may give a better model.")
    if skipped := run.scores.get("skipped"):
        lines.append(f"{len(skipped)} slides that could not be read are in no number.")
    if approximation := run.memory.get("approximation"):
        lines.append(f"Training was an approximation ({approximation}).")
    return [*lines, "A model for research, and no medical device."]


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by whole names."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def difference(run: RunResults, baseline: RunResults, study: Study | None) -> Interval:
    """The main score of the run minus that of the baseline, paired by slide; as in the scores of their comparison, if
    they are of one."""
    if kinds_of(run.predictions) != kinds_of(baseline.predictions):
        raise UserError(f"{baseline.folder.path} predicts something else than {run.folder.path}; give another baseline")
    main = main_of(run.predictions)
    name, score = next(iter(main.SCORES.items()))
    if study is not None and study.kind == "comparison":
        with as_written(study.results):
            if name in (found := study.scores["scores"]):
                return Interval.of(found[name]["difference"])
    return paired_difference(main, main_of(baseline.predictions), score)


def delong_of(run: RunResults, baseline: RunResults) -> dict[str, tuple[Interval, float]]:
    """By target of two classes, or label, the AUC of the run minus that of the baseline by DeLong, and p of none."""
    ours, theirs = binary_targets(run.predictions), binary_targets(baseline.predictions)
    return {name: delong_difference(ours[name], theirs[name]) for name in ours if name in theirs}


def main_of(predictions: Predictions) -> Predictions:
    """The predictions of the first target."""
    return next(iter(predictions.by_target.values()))
