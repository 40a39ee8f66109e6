"""Predictions and scores of a run on the slides of a split or of a cohort, and the files that they are written to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import grouped
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.splits import first_names
from wsi_trainer.errors import UserError
from wsi_trainer.fit.folder import note_failure
from wsi_trainer.fit.result import LESIONS, Work
from wsi_trainer.fit.trainer import at_work, image_of, logged_to
from wsi_trainer.io.display import say
from wsi_trainer.io.files import read_json, sha256_of, write_json
from wsi_trainer.io.tables import write_table
from wsi_trainer.metrics import (
    FROC_SCORES,
    RISK_SCORES,
    Baseline,
    Decision,
    Interval,
    LesionPredictions,
    Marks,
    Predictions,
    at_the_point,
    summarise,
    survivals,
    write_predictions,
)
from wsi_trainer.metrics.decision import EVEN, decisions_record
from wsi_trainer.models.tasks import Owners, Task
from wsi_trainer.preprocess.inputs import is_table, list_slides
from wsi_trainer.slide.names import slide_name

if TYPE_CHECKING:  # a run scores itself
    from pandas import DataFrame

    from wsi_trainer.fit.run import Run

log = logging.getLogger("wsi_trainer")


def name_of(slides: Path) -> str:
    """The name of a cohort that was given none: that of its file, or of the folder of a file that says nothing."""
    name = slides.stem if is_table(str(slides)) else slide_name(slides)
    return slides.resolve().parent.name if name in ("manifest", "stores", "slides") else name


def labelled_slides(cohort: Run, given: Path | DataFrame, root: Path | None) -> list[SlideRecord]:
    """The slides of a manifest, all of them to be tested; those that the run was trained on are left out.

    Args:
        cohort: The run with the name that the slides get.
        given: The manifest.
        root: Where its relative paths start.
    """
    task, features = cohort.loaded.model.task, cohort.loaded.data.features
    records = cohort.records_in(given, root, columns=task.columns, filled=not task.may_be_empty)
    records = cohort.unseen(records, features)
    cohort.as_seen(records)  # refuses them before anything is written
    cohort.predictor.covariates_of(records)
    return [replace(record, split="test") for record in records]


def tested(run: Run, slides: str | Path | DataFrame, name: str, overwrite: bool) -> Run:
    """Score a run on the slides of a manifest or a table."""
    cohort = run.of_cohort(name)
    cohort.result("test").keep(overwrite)
    records = labelled_slides(cohort, Path(slides) if isinstance(slides, str) else slides, run.data_root)
    test_split(cohort, "test", overwrite=overwrite, slides=records)
    return cohort


def keep_slides(cohort: Run, records: Sequence[SlideRecord]) -> None:
    """Keep the list of slides without labels, so that `heatmap`, `segment` and `view` know the cohort by its name.

    The slides of a cohort that was tested are those of its scores, and stay.
    """
    features = cohort.loaded.data.features
    if cohort.is_tested:
        cohort.check_same(records, features)
    else:
        cohort.freeze([replace(record, split="test") for record in records], features=features)


def records_of(run: Run, slides: str, root: Path | None) -> list[SlideRecord]:
    """The slides that a user means, without labels: those of a manifest, of a folder, or one.

    Args:
        run: The run.
        slides: The manifest, the folder or the slide.
        root: Where relative paths of the manifest start.
    """
    if is_table(slides):
        records = run.records_in(Path(slides), root, labelled=False)
    else:
        listed = list_slides(slides, note=lambda text: say(Console(), text))
        records = [run.predictor.record_of(one.job.slide, one.job.name) for one in listed]
    run.predictor.covariates_of(records)  # refuses them before anything is written
    return run.as_seen(records)


# Predictions and scores.


def test_split(
    run: Run, split: str, progress: bool = True, overwrite: bool = True, slides: Sequence[SlideRecord] | None = None
) -> dict[str, Any]:
    """Predict a split of the run, or of its cohort, decide as the run does, and write predictions and scores.

    Args:
        run: The run.
        split: Which slides.
        progress: Whether to show a progress bar.
        overwrite: Whether to replace what an earlier command wrote.
        slides: The slides of a cohort, which it keeps.
    """
    failures, result = Failures(run), run.result("test", split)
    if slides is None:
        data = slides_of(run, split)  # refuses them before anything is written
    with result.locked(overwrite):
        if slides is not None:
            run.freeze(slides, features=run.loaded.data.features)
            data = slides_of(run, split)
        work = run.work(result, data.of(split), overwrite=overwrite)
        predictions = predictions_of(run, data, split, failures, work, progress)
        decisions = decisions_of(run, predictions if split == "val" else None, progress)
        baselines = baselines_of(run, progress)
        predictions = predictions.with_decisions(decisions | cuts_of(baselines))
        write_predictions(result.file, predictions)
        scores = scores_of(run, split, predictions, decisions, baselines) | {"skipped": failures.slides}
        write_json(result.scores, scores)
        run.finish(work)
    return scores


def scores_of(
    run: Run,
    split: str,
    predictions: Predictions,
    decisions: Mapping[str, Decision],
    baselines: Mapping[str, Baseline],
) -> dict[str, Any]:
    """The scores of a split with what they are of, as in `evaluation/SPLIT.json`."""
    task, cohort = run.loaded.model.task, {} if run.cohort is None else {"cohort": run.cohort}
    scores: dict[str, Any] = {"split": split, "checkpoint": run.checkpoint_name, "task": type(task).__name__} | cohort
    scores |= summarise(predictions, dict(task.scores), run.loaded.train.resamples, 0)
    scores |= {"operating_points": points} if (points := at_the_point(predictions)) else {}
    scores |= {"survival": found} if (found := survivals(predictions, baselines)) else {}
    return scores | ({"decisions": task.sentences_on(decisions)} if decisions else {})


def predict_slides(
    cohort: Run, records: Sequence[SlideRecord], overwrite: bool
) -> tuple[list[SlideRecord], list[np.ndarray]]:
    """Write what a run predicts of slides without labels; returns the slides, or patients, and the numbers of each.

    Args:
        cohort: The run with the name, and the place, that the slides get.
        records: The slides, as seen.
        overwrite: Whether to replace what an earlier command wrote.
    """
    result, data = cohort.result("predict"), cohort.loaded.data
    with result.locked(overwrite):
        keep_slides(cohort, records)
        cases = grouped(data, records, None)
        work = cohort.work(result, cases, overwrite=overwrite)
        with at_work(cohort.writable), logged_to(cohort.log):
            said = predicted(cohort, cases, work, Failures(cohort))
        decisions_of(cohort)  # chosen now, where they were not yet
        kept = [case for case in cases if case.slide in said]
        columns = cohort.predictor.columns(kept, [said[case.slide] for case in kept])
        write_table(result.file, list(columns), zip(*columns.values()))
        cohort.finish(work)
    return kept, [said[case.slide] for case in kept]


def slides_of(run: Run, split: str) -> SlideData:
    """The slides of a split of the run, or of its cohort, with their labels."""
    model, data, config = run.loaded
    task = model.task
    run.tell_changes(data, task.columns, model.covariates.names)
    records = run.records(split, task.columns, not task.may_be_empty, data.features)
    beside = model.wants_places, model.covariates, model.sees_slide
    return SlideData(data, task, config.seed, image_of(config), model.tissue_stride, records, *beside)


def predictions_of(
    run: Run, slides: SlideData, split: str, failures: Failures, work: Work | None = None, progress: bool = True
) -> Predictions:
    """The predictions of the slides of a split; see `predicted`."""
    task, cases = run.loaded.model.task, slides.of(split)
    with at_work(run.writable), logged_to(run.log):
        said = predicted(run, cases, work, failures, task, progress)
        slides.warn_of_lack(split)
    kept = [record for record in cases if record.slide in said]
    if not kept:
        raise UserError(f"none of the {len(cases)} slides of the split {split} can be read; see {run.failures}")
    numbers = np.stack([said[record.slide] for record in kept])
    return task.predictions(owners_of(kept), slides.rows_of(kept), numbers)


def decisions_of(run: Run, validated: Predictions | None = None, progress: bool = True) -> dict[str, Decision]:
    """The decision of each target that has a threshold; chosen on the validation slides, if that was not done yet.

    Args:
        run: The run, or one of its cohorts, for which it decides alike.
        validated: Predictions of the run's validation slides, where they are at hand.
        progress: Whether to show a progress bar.
    """
    if (known := run.predictor.decisions) is not None:
        return known
    rule = run.loaded.train.decision
    parts = [part for part in run.loaded.model.task.slide_parts if part.task.has_threshold]
    if validated is None:
        own = run.without_cohort
        validated = predictions_of(own, slides_of(own, "val"), "val", Failures(own), progress=progress)
    found = {}
    for part in parts:
        if (decision := validated.by_target[part.name].chosen(rule)) is not None:
            found[part.name] = decision
            if EVEN in decision.thresholds:
                log.warning(
                    "the split val has no slides with and without %s: what is more probable is decided for, as there "
                    "is no threshold to choose", part.name,
                )  # fmt: skip
    write_json(run.decisions, read_json(run.decisions) | {run.checkpoint_name: decisions_record(rule, found)})
    return found


def baselines_of(run: Run, progress: bool = True) -> dict[str, Baseline]:
    """By target of a survival what the training patients say of a risk; computed if that was not done yet.

    None where the training slides are gone: the risks of others are then not cut into groups.
    """
    parts = [part for part in run.loaded.model.task.slide_parts if part.task.scores is RISK_SCORES]
    if not parts:
        return {}
    if known := run.trained_risks:
        return {name: Baseline.read(one) for name, one in known.items()}
    own = run.without_cohort
    try:
        slides = slides_of(own, "train")
    except UserError as error:
        log.warning("risks are not cut into groups, since the training slides are not there: %s", error)
        return {}
    trained = predictions_of(own, slides, "train", Failures(own), progress=progress)
    found = {}
    for part in parts:
        risks: Any = trained.by_target[part.name].by_patient()
        found[part.name] = Baseline.of(risks)
    facts = {"sha256": sha256_of(run.checkpoint()), "targets": {name: one.record() for name, one in found.items()}}
    write_json(run.baseline, read_json(run.baseline) | {run.checkpoint_name: facts})
    return found


def cuts_of(baselines: Mapping[str, Baseline]) -> dict[str, Decision]:
    """The median risk of the training patients as a decision on who is of higher risk."""
    return {name: Decision((one.median,), "median of training") for name, one in baselines.items()}


class Failures:
    """The slides that cannot be read, where a command may go on without them; each is a line of failures.csv."""

    def __init__(self, run: Run) -> None:
        self.path, self.slides = run.failures, list[str]()
        self.noted = self.note if run.loaded.data.on_error == "skip" else None
        """Is told of each; None where the first one ends the command."""

    def note(self, slide: str, reason: str) -> None:
        """A slide is left out."""
        self.slides.append(slide)
        note_failure(self.path, slide, "predict", 0, reason)


def predicted(
    run: Run,
    cases: Sequence[SlideRecord],
    work: Work | None,
    failures: Failures,
    task: Task | None = None,
    progress: bool = True,
) -> dict[str, np.ndarray]:
    """The numbers of slides, or of patients with `data.group`, by their names, each kept as soon as it is there;
    unreadable ones are absent.

    Args:
        run: The run.
        cases: The slides or patients.
        work: Has those that are finished; None keeps none.
        failures: Is told of slides that cannot be read.
        task: Makes targets, where a prediction is compared with them pixel by pixel.
        progress: Whether to show a bar with the time left.
    """
    said = {} if work is None else {case.slide: done for case in cases if (done := work.entry(case)) is not None}
    left = {case.slide: case for case in cases if case.slide not in said}
    if left:
        found = run.predictor.predict_all(list(left.values()), task, run.loaded.data.workers, failures.noted)
        with Progress(transient=True, disable=not progress) as bar:
            row = bar.add_task("predicting", total=len(left))
            for number, prediction in enumerate(found, start=1):
                values = prediction.values.tolist()
                case = left[prediction.slide]
                said[case.slide] = values if work is None else work.add(case, values)
                bar.update(row, completed=number + len(failures.slides))
    return {case.slide: np.array(said[case.slide]) for case in cases if case.slide in said}


def owners_of(records: Sequence[SlideRecord]) -> Owners:
    """Slides, patients and sites of the records."""
    sites = tuple(record.site for record in records) if any(record.site for record in records) else ()
    return Owners(tuple(r.slide for r in records), tuple(r.patient for r in records), sites)


def show(scores: dict[str, Any], run: Run) -> None:
    """Print the scores of a split, or of a cohort."""
    console = Console()
    where = f"the split {scores['split']}" if run.cohort is None else f"the cohort {run.cohort}"
    say(console, f"{scores['slides']} slides of {scores['patients']} patients in {where}:")
    width = max(len(name) for name in scores["slide"])
    for name, interval in scores["slide"].items():
        say(console, f"  {name:{width}} {Interval.of(interval)}")
    for line in scores.get("decisions", ()):
        say(console, line)
    if scores["skipped"]:
        say(console, f"left out, since they cannot be read: {first_names(scores['skipped'])}; see {run.failures}")


def write_lesions(
    folder: Path,
    records: Sequence[SlideRecord],
    marks: Sequence[tuple[Marks, ...]],
    classes: Sequence[str],
    resamples: int,
) -> dict[str, Any]:
    """Write the marks of each slide and class as lesions.csv; returns FROC with its intervals, for scores.json."""
    owners = owners_of(records)
    lesions = LesionPredictions.of_slides(owners.slides, owners.patients, tuple(classes), marks, owners.sites)
    lesions.write(folder / LESIONS)
    return summarise(lesions, FROC_SCORES, resamples)
