"""Deployment: predictions of one or several runs on a cohort that none of them has seen, in a folder of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from wsi_trainer.data.covariates import cells_of, is_missing
from wsi_trainer.data.dataset import grouped, targets_of
from wsi_trainer.data.manifest import FEATURES, SlideRecord
from wsi_trainer.data.shift import as_number, columns_of, shift
from wsi_trainer.data.splits import first_names
from wsi_trainer.environment import environment
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import Method
from wsi_trainer.explain.heatmaps import write_heatmaps
from wsi_trainer.explain.slide_map import MapOptions
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.predictor import columns_by
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.scoring import (
    Failures,
    baselines_of,
    cuts_of,
    decisions_of,
    name_of,
    owners_of,
    predict_slides,
    predictions_of,
    slides_of,
)
from wsi_trainer.fit.status import StatusFile, recorded
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import say
from wsi_trainer.io.files import sha256_of
from wsi_trainer.io.tables import read_table, unescape_formula, write_table
from wsi_trainer.metrics import (
    Baseline,
    Decision,
    Interval,
    Predictions,
    PredictionsError,
    at_the_point,
    read_predictions,
    score_intervals,
    summarise,
    survivals,
    unpaired_difference,
    write_predictions,
)
from wsi_trainer.metrics.operating import binary_targets, operating_point
from wsi_trainer.metrics.table import join
from wsi_trainer.models.tasks import Task
from wsi_trainer.preprocess.inputs import is_table, list_slides

InBoth = Literal["refuse", "leave-out"]
ENSEMBLE = "ensemble"
MOST_GROUPS = 12
"""Groups of a column that are shown, those with the most slides."""
MOST_NUMBERS = 4
"""Different numbers of a column up to which each is a subgroup, as of a grade; more are cut at their median."""


def members_of(
    folders: Sequence[Path], name: str, out: Path, checkpoint: str, overrides: Sequence[str]
) -> tuple[dict[str, Run], Study | None]:
    """The runs of folders, of a study its folds, each with a place for the cohort; and the study, where it is one.

    Args:
        folders: Runs, or one study of folds.
        name: The cohort's name.
        out: The folder of the deployment.
        checkpoint: best, last, or a path.
        overrides: Keys of the config to change.

    Raises:
        UserError: A folder is no run, or they do not predict the same.
    """
    studies = [Study.at(folder) for folder in folders]
    if len(folders) > 1 and (other := next((one for one in studies if one is not None), None)) is not None:
        raise UserError(f"{other.path} is a study of several runs; deploy it alone, or name its runs")
    study = studies[0]
    if study is not None and study.kind != "folds":
        raise study.refuse()
    given = list(folders) if study is None else [run.path for run in study.runs.values()]
    names = [folder.resolve().name for folder in given]
    twice = {one for one, count in Counter(names).items() if count > 1}
    members = {}
    for folder, own in zip(given, names, strict=True):
        called = f"{folder.resolve().parent.name}-{own}" if own in twice else own
        if called in members:
            raise UserError(f"{folder} is named twice, or called as another run; rename one of the two folders")
        run = Run.open(folder, checkpoint, overrides=overrides)
        members[called] = run.of_cohort(name, out / "members" / called)
    first = next(iter(members))
    for run in members.values():
        task, its = (one.loaded.model.task for one in (members[first], run))
        if task.pixels is not None:
            raise UserError(f"{run.path} finds regions; `wsi-train segment` and `test --cohort` score those")
        if (tuple(task.by_target), task.names, task.columns) != (tuple(its.by_target), its.names, its.columns):
            raise UserError(f"{run.path} predicts something else than {members[first].path}; deploy runs of one task")
    return members, study


def records_for(member: Run, slides: str, root: Path | None) -> list[SlideRecord]:
    """The slides that a user means, whose labels may be missing: of a manifest, of a folder of slides or features."""
    if is_table(slides):
        return member.records_in(Path(slides), root, labelled=False)
    if member.loaded.data.features is not None:
        files = [path for kind in FEATURES for path in sorted(Path(slides).glob(kind.format("*")))]
        names = [path.name.removesuffix(path.suffix) for path in files]
        if not files:
            raise UserError(f"{slides} has no features, NAME.h5 or NAME.pt, which {member.path} reads")
        return [SlideRecord(name, Path(slides) / name, "", name, "") for name in names]
    listed = list_slides(slides, note=lambda text: say(Console(), text))
    return [SlideRecord(one.job.name, one.job.slide, "", one.job.name, "") for one in listed]


def without_known(
    members: Mapping[str, Run], records: Sequence[SlideRecord], in_both: InBoth
) -> tuple[list[SlideRecord], dict[str, list[str]]]:
    """The slides of patients that no member knows; and by reason those left out.

    Args:
        members: The runs.
        records: The slides of the cohort.
        in_both: Whether others are an error.

    Raises:
        UserError: Slides or patients are in both, or nothing else is left.
    """
    slides, patients = set[str](), set[str]()
    for run in members.values():
        own, called = run.shared(records, run.loaded.data.features)
        slides, patients = slides | own, patients | called
    patients |= {record.patient for record in records if record.slide in slides}
    left = [record for record in records if record.patient not in patients]
    if patients and in_both == "refuse":
        raise UserError(
            f"patients of the cohort are in the training cohort too: {first_names(sorted(patients))}. "
            "--in-both leave-out leaves out their slides; if they are other persons of the same names, write the "
            "hospital before them in the column patient"
        )
    if not left:
        raise UserError("all patients of the cohort are in the training cohort; give other slides")
    gone = sorted(record.slide for record in records if record.patient in patients)
    if gone:
        say(Console(), f"{len(gone)} slides of {len(patients)} patients of training are left out: {first_names(gone)}")
    return left, {"patients in both": sorted(patients), "slides": gone} if gone else {}


def predicted_before(
    member: Run, records: Sequence[SlideRecord], overwrite: bool
) -> tuple[list[SlideRecord], list[NDArray[np.float64]]] | None:
    """The predictions of a member that was done when the deployment was killed, as `predict_slides` has them."""
    result, task = member.result("predict"), member.loaded.model.task
    if overwrite or not result.whole or result.journal.is_file():
        return None
    if member.outdated or result.of.get("overrides") != member.given:
        return None
    member.check_same(records, member.loaded.data.features)
    cases = {case.slide: case for case in grouped(member.loaded.data, records, None)}
    rows = {unescape_formula(row["slide"]): row for _, row in read_table(result.file).rows}
    if not set(cases) <= set(rows):
        return None
    return list(cases.values()), [np.array([float(rows[name][one]) for one in task.names]) for name in cases]


def with_labels(task: Task, cases: Sequence[SlideRecord]) -> list[SlideRecord]:
    """The slides, or patients, of which some label is known; columns that the cohort lacks are empty."""
    found = []
    for case in cases:
        cells = [case.cells.get(column, "") for column in task.columns]
        if any(cells) if task.may_be_empty else all(cells):
            missing = {column: "" for column in task.columns if column not in case.cells}
            found.append(replace(case, others={**case.others, **missing}))
    return found


def predictions_for(
    task: Task, cases: Sequence[SlideRecord], numbers: Mapping[str, NDArray[np.float64]]
) -> Predictions | None:
    """The predictions of the slides with labels; None where none has one."""
    known = with_labels(task, [case for case in cases if case.slide in numbers])
    if not known:
        return None
    rows = torch.cat([task.row(targets_of(task, case)).double() for case in known]).numpy()
    return task.predictions(owners_of(known), rows, np.stack([numbers[case.slide] for case in known]))


def validated(member: Run) -> Predictions:
    """Predictions of a member on its validation slides: its own result, or one that is made and kept at its place."""
    own = member.without_cohort
    result, place = own.result("test", "val"), member.writable / "validation.csv"
    if result.whole and own.outdated == "":
        return read_predictions(result.file)
    if not place.is_file():
        write_predictions(place, predictions_of(own, slides_of(own, "val"), "val", Failures(own)))
    return read_predictions(place)


def ensemble_decisions(members: Mapping[str, Run]) -> dict[str, Decision]:
    """The decision of the mean of members: their own, or by the same rule on the validation slides of all."""
    first = next(iter(members.values()))
    if len(members) == 1:
        return decisions_of(first, None if first.predictor.decisions is not None else validated(first))
    rules = {run.loaded.train.decision for run in members.values()}
    if len(rules) > 1:
        raise UserError(f"the runs decide by {', '.join(sorted(rules))}; give one rule, --train.decision youden")
    rule, task = rules.pop(), first.loaded.model.task
    if (known := task.decisions_by(rule)) is not None:
        return known
    joined = join([decided(validated(run), {}) for run in members.values()])
    parts = [part.name for part in task.slide_parts if part.task.has_threshold]
    chosen = {name: joined.by_target[name].chosen(rule) for name in parts}
    return {name: one for name, one in chosen.items() if one is not None}


def internal_of(
    members: Mapping[str, Run], study: Study | None, baselines: Mapping[str, Mapping[str, Baseline]]
) -> Predictions | None:
    """Predictions of the members on the slides that they held out: of a study pooled, of several runs their mean.

    None where they are not tested, or several runs held out different slides.
    """
    owns = [run.without_cohort for run in members.values()]
    split = "test" if study is None else str(study.split)
    if not all(own.result("test", split).whole for own in owns):
        say(Console(), "the runs have no scores of their own held-out slides to compare with: `wsi-train test RUN`")
        return None
    each = [
        decided(read_predictions(own.predictions_file(split)), decisions_of(run) | cuts_of(baselines[called]))
        for own, (called, run) in zip(owns, members.items(), strict=True)
    ]
    if study is not None:
        return join(each)
    if len(each) == 1:
        return each[0]
    if any(set(one.slides) != set(each[0].slides) for one in each):
        say(Console(), "the runs held out different slides: there are no internal scores of their mean")
        return None
    task = owns[0].loaded.model.task
    numbers = {
        called: {slide: numbers_of(task, one, slide) for slide in each[0].slides}
        for called, one in zip(members, each, strict=True)
    }
    return predictions_for(task, slides_of(owns[0], split).of(split), mean_of(task, numbers, baselines, each[0].slides))


def decided(predictions: Predictions, decisions: Mapping[str, Decision]) -> Predictions:
    """The predictions with these decisions, and without others."""
    return predictions.with_decisions({name: decisions.get(name, Decision()) for name in predictions.by_target})


def numbers_of(task: Task, predictions: Predictions, slide: str) -> NDArray[np.float64]:
    """Numbers that are predicted of a slide, in the order of the task's names."""
    columns, row = predictions.columns(), predictions.slides.index(slide)
    return np.array([float(columns[name][row]) if name in columns else np.nan for name in task.names])


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """Options of `wsi-train deploy`."""

    name: str | None = None
    """The cohort's name; by default that of its file or folder."""
    out: Path | None = None
    """The folder of the deployment; by default deployments/NAME."""
    in_both: InBoth = "refuse"
    """Patients that the runs know: refuse says so and ends, leave-out goes on without their slides."""
    subgroups: str = ""
    """Columns of the manifest, as sex,stage: scores of the slides with each of their values."""
    maps: Method | None = None
    """Maps of each slide by each run, by this method of `wsi-train heatmap`."""
    compare_slides: bool = True
    """Whether to open slides of training and of the cohort, to say in what they are unlike."""
    overwrite: bool = False
    """Whether to replace an earlier deployment of this name."""


def run_deployment(
    folders: Sequence[Path], slides: str, options: DeployOptions, checkpoint: str, data_root: Path | None,
    overrides: Sequence[str],
) -> Deployment:  # fmt: skip
    """Predict a cohort by runs, score it where it has labels, and compare it with what they held out.

    Args:
        folders: Runs, or one study of folds.
        slides: A manifest, a folder of slides or of features, or a slide.
        options: What is written where.
        checkpoint: best, last, or a path.
        data_root: Where relative paths of the manifest start.
        overrides: Keys of the config to change.
    """
    name = options.name or name_of(Path(slides))
    out = options.out or Path("deployments") / name
    deployment = Deployment(out)
    if deployment.whole and not options.overwrite:
        raise UserError(f"{out} has a deployment already; give another --name, or --overwrite")
    if not is_table(slides) and Path(slides).is_dir() and any(Path(slides).glob("*.h5")) and not _has(overrides):
        overrides = [*overrides, f"--data.features={Path(slides).absolute()}"]
    members, study = members_of(folders, name, out, checkpoint, overrides)
    first = next(iter(members.values()))
    every = records_for(first, slides, data_root)
    records, left_out = without_known(members, every, options.in_both)
    cases = grouped(first.loaded.data, records, None)
    columns = subgroup_columns(options.subgroups, cases)
    for member in members.values():
        member.predictor.covariates_of(cases)  # refuses them before anything is written
    missing = missing_covariates(members, cases)
    for column in missing:
        say(Console(), f"{column}, which the model takes beside the slide, is missing of all slides")
    begun: dict[str, Any] = {
        "schema": 1, "whole": False, "name": name, "slides": len(cases),
        "left_out": left_out, "missing_covariates": missing,
        "members": {
            called: {
                "run": str(run.path.absolute()), "checkpoint": run.chosen, "sha256": sha256_of(run.checkpoint()),
            }
            for called, run in members.items()
        },
        "study": None if study is None else str(study.path),
    }  # fmt: skip
    if options.overwrite:
        for member in members.values():
            member.result("predict").last.unlink(missing_ok=True)
    deployment.write(begun)
    with recorded(deployment.status) as status:
        _deploy(deployment, begun, members, study, records, options, columns, status)
    return deployment


def _deploy(
    deployment: Deployment, begun: Mapping[str, Any], members: Mapping[str, Run], study: Study | None,
    records: Sequence[SlideRecord], options: DeployOptions, by: Sequence[str], status: StatusFile,
) -> None:  # fmt: skip
    """Predict, score and compare, and write what was found."""
    first = next(iter(members.values()))
    task = first.loaded.model.task
    numbers, external = dict[str, dict[str, NDArray[np.float64]]](), dict[str, Predictions]()
    baselines = dict[str, dict[str, Baseline]]()
    cases: list[SlideRecord] = []
    for called, member in members.items():
        if len(members) > 1:
            Console().rule(called, align="left")
        own = [replace(record, split="test") for record in member.as_seen(records)]
        if member.predictor.decisions is None:
            decisions_of(member, validated(member))
        cases, said = predicted_before(member, own, options.overwrite) or predict_slides(
            member, own, options.overwrite or member.result("predict").whole
        )
        baselines[called] = baselines_of(member)
        numbers[called] = {case.slide: row for case, row in zip(cases, said, strict=True)}
        if (predictions := predictions_for(task, cases, numbers[called])) is not None:
            external[called] = decided(predictions, decisions_of(member) | cuts_of(baselines[called]))
        if options.maps is not None:
            write_maps(member, options.maps, options.overwrite)
    together = set.intersection(*(set(own) for own in numbers.values()))
    cases = [case for case in cases if case.slide in together]
    mean = mean_of(task, numbers, baselines, [case.slide for case in cases])
    decisions = ensemble_decisions(members)
    columns = columns_by(task, decisions, cases, [mean[case.slide] for case in cases])
    write_table(deployment.predictions_file, list(columns), zip(*columns.values()))
    labelled, internal = predictions_for(task, cases, mean), internal_of(members, study, baselines)
    resamples, both = first.loaded.train.resamples, mean_baselines(list(baselines.values()))
    facts: dict[str, Any] = {
        **begun, "whole": True, "slides": len(cases), "patients": len({case.patient for case in cases}),
        "labelled": 0 if labelled is None else len(labelled),
        "unreadable": sorted({record.slide for record in records} - set(_parts(cases))),
        "decisions": task.sentences_on(decisions), "environment": environment(),
    }  # fmt: skip
    if labelled is not None:
        labelled = decided(labelled, decisions | cuts_of(both))
        write_predictions(deployment.labelled_file, labelled)
        facts["external"] = scored(task, labelled, resamples, both)
        facts["each"] = {called: scored(task, its, resamples, baselines[called]) for called, its in external.items()}
    if internal is not None:
        if study is None:
            internal = decided(internal, decisions | cuts_of(both))
        write_predictions_of_folds(deployment.internal_file, internal)
        facts["internal"] = scored(task, internal, resamples, both if study is None else {})
    if labelled is not None and internal is not None:
        facts["differences"] = differences(facts["external"], facts["internal"])
    if labelled is not None:
        facts["subgroups"] = subgroups(labelled, cases, by)
    trained = [r for run in members.values() for r in run.without_cohort.kept() if r.split == "train"]
    trained = list({record.slide: record for record in trained}.values())
    if options.compare_slides:
        facts["shift"] = [one.to_dict() for one in shift(trained, records, set(task.columns))]
    deployment.write(facts)
    status.update(scores={name: one["value"] for name, one in facts.get("external", {}).get("slide", {}).items()})


def _has(overrides: Sequence[str]) -> bool:
    return any(word.startswith("--data.features") for word in overrides)


def _parts(cases: Sequence[SlideRecord]) -> list[str]:
    return [part.slide for case in cases for part in (case.parts or (case,))]


def write_predictions_of_folds(path: Path, predictions: Predictions) -> None:
    """Write predictions, of which those of folds are decided by several thresholds and a file has one: by none then."""
    try:
        write_predictions(path, predictions)
    except PredictionsError:
        write_predictions(path, decided(predictions, {}))


def mean_of(
    task: Task,
    numbers: Mapping[str, Mapping[str, NDArray[np.float64]]],
    baselines: Mapping[str, Mapping[str, Baseline]],
    slides: Sequence[str],
) -> dict[str, NDArray[np.float64]]:
    """The mean of what members predict, by slide; risks of several are brought to one scale by their training patients.

    Args:
        task: Names what is predicted.
        numbers: By member and slide.
        baselines: By member and target of a survival.
        slides: Those that all members predicted.
    """
    at = dict(zip(task.by_target, np.cumsum([0, *(len(one.names) for one in task.by_target.values())]), strict=False))
    scaled = []
    for called, own in numbers.items():
        rows = np.array([own[slide] for slide in slides])
        for name, baseline in baselines[called].items() if len(numbers) > 1 else ():
            rows[:, at[name]] = baseline.relative(rows[:, at[name]])
        scaled.append(rows)
    return dict(zip(slides, np.mean(scaled, axis=0), strict=True))


def mean_baselines(several: Sequence[Mapping[str, Baseline]]) -> dict[str, Baseline]:
    """The baseline of the mean of members, by target; none where a member has none."""
    if len(several) == 1:
        return dict(several[0])
    return {
        name: Baseline.mean([one[name] for one in several]) for name in several[0] if all(name in o for o in several)
    }


def scored(task: Task, predictions: Predictions, resamples: int, baselines: Mapping[str, Baseline]) -> dict[str, Any]:
    """The scores of predictions, what is decided with, and survival, as JSON."""
    found = summarise(predictions, dict(task.scores), resamples, 0)
    found |= {"operating_points": points} if (points := at_the_point(predictions)) else {}
    return found | ({"survival": survival} if (survival := survivals(predictions, baselines)) else {})


def differences(external: Mapping[str, Any], internal: Mapping[str, Any]) -> dict[str, Any]:
    """External less internal, for each score and each measure where it is decided, by slide and by patient."""

    def of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: unpaired_difference(Interval.of(one[name]), Interval.of(other[name])).to_dict()
            for name in one
            if name in other and isinstance(one[name], Mapping) and "value" in one[name]
        }

    found: dict[str, Any] = {
        level: of(external[level], internal[level])
        for level in ("slide", "patient")
        if level in external and level in internal
    }
    points, theirs = external.get("operating_points", {}), internal.get("operating_points", {})
    found["operating_points"] = {
        name: {level: of(points[name][level], theirs[name][level]) for level in ("slide", "patient")}
        for name in points
        if name in theirs
    }
    return found


def subgroup_columns(words: str, cases: Sequence[SlideRecord]) -> list[str]:
    """The columns of `--subgroups`, by default the site where the cohort has several.

    Raises:
        UserError: The cohort lacks one.
    """
    columns = [column for column in re.split(r"[,\s]+", words) if column]
    known = {name for case in cases for name in columns_of(case)}
    if lacking := [column for column in columns if column not in known]:
        raise UserError(
            f"--subgroups {words}: the cohort has no column {', '.join(lacking)}; it has {', '.join(sorted(known))}"
        )
    return columns or (["site"] if len({case.site for case in cases} - {""}) > 1 else [])


def missing_covariates(members: Mapping[str, Run], cases: Sequence[SlideRecord]) -> list[str]:
    """The columns that a model takes beside the slide, and no slide of the cohort has a value of."""
    columns = {one.name: one for run in members.values() for one in run.loaded.model.covariates.columns}
    return [
        name
        for name, one in columns.items()
        if all(is_missing(cells_of(case).get(name, ""), one.kind) for case in cases)
    ]


def subgroups(labelled: Predictions, cases: Sequence[SlideRecord], columns: Sequence[str]) -> dict[str, Any]:
    """Scores of the patients with each value of columns of the manifest.

    Returns:
        By column, by value: `slides`, `patients`, `scores` (the first score of the main target, and the shares where
        it decides); `comparisons`, how many intervals that are, of which one in twenty misses by chance; and by column
        `in_several`, the patients whose slides are in different groups.
    """
    cells = {case.slide: columns_of(case) for case in cases}
    main = next(iter(labelled.by_target.values()))
    name, score = next(iter(main.SCORES.items()))
    found: dict[str, Any] = {}
    in_several = dict[str, list[str]]()
    comparisons = 0
    for column in columns:
        groups = grouped_by([cells[slide].get(column, "") for slide in main.slides])
        times = Counter(patient for rows in groups.values() for patient in {main.patients[row] for row in rows})
        if several := sorted(patient for patient, count in times.items() if count > 1):
            in_several[column] = several
            say(Console(), f"patients with different {column} on their slides, in two groups: {first_names(several)}")
        for value, rows in groups.items():
            part = main.take(rows)
            try:
                patients = part.by_patient()
            except PredictionsError:
                patients = part
            intervals = score_intervals(patients, {name: score})
            for one in binary_targets(patients).values():
                intervals |= operating_point(one)
                break
            comparisons += sum(not one.absent for one in intervals.values())
            found.setdefault(column, {})[value] = {
                "slides": len(part), "patients": len(set(part.patients)),
                "scores": {name: one.to_dict() for name, one in intervals.items()},
            }  # fmt: skip
    return {"columns": found, "comparisons": comparisons, "in_several": in_several}


def grouped_by(values: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Rows by value; of more than a few different numbers those up to the median and those above."""
    cells = np.array(values, dtype=object).astype(str)
    numbers = [as_number(value) for value in values if value]
    if len(set(numbers)) > MOST_NUMBERS and None not in numbers:
        middle = float(np.median(np.array(numbers, dtype=float)))
        said = {
            value: "not known" if not value else f"up to {middle:g}" if float(value) <= middle else f"above {middle:g}"
            for value in set(values)
        }
        cells = np.array([said[value] for value in values])
    names, counts = np.unique(cells, return_counts=True)
    names = names[np.argsort(-counts, kind="stable")][:MOST_GROUPS]
    return {str(name) or "not known": np.flatnonzero(cells == name) for name in sorted(names)}


def write_maps(member: Run, method: Method, overwrite: bool) -> None:
    """Maps of all slides of the cohort by a member."""
    if not member.result("heatmap", method=method).whole or overwrite:
        write_heatmaps(member, options=MapOptions(method=method), overwrite=True)
