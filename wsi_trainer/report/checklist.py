"""TRIPOD+AI: what a paper on a prediction model has to say, filled from what a run knows; the rest is its author's.

The items are those of Collins and others (BMJ 2024; 385: e078378), in words of our own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.io.files import as_written, read_json
from wsi_trainer.io.tables import write_table
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.metrics import Interval
from wsi_trainer.report.contents import RunResults, covariates_in, first_of, flat

ITEMS = {
    "1": "Title: that a prediction model is developed or evaluated, for whom, and of which outcome",
    "2": "Abstract, by the checklist for abstracts",
    "3a": "Background: the clinical setting, and why a model is wanted", "3b": "Who is to be predicted, who uses it",
    "3c": "Known inequalities in health between groups of patients",
    "4": "Aims: development, evaluation, or both",
    "5a": "Data: where they come from, apart for development and evaluation", "5b": "Dates of collection and follow-up",
    "6a": "Setting, number and place of centres", "6b": "Who was eligible", "6c": "Treatments, and how they count",
    "7": "Preparation of data and checks of quality, alike in all groups",
    "8a": "Outcome: its definition and when it is known", "8b": "Who judged it, where it needs judgement",
    "8c": "Whether they were blind to the predictors",
    "9a": "Predictors: why these", "9b": "How and when each is measured", "9c": "Who judged them, where that is needed",
    "10": "Sample size: the reason for it, in development and evaluation",
    "11": "Missing data: how many, and what was done",
    "12a": "Use of the data: splits, and what each was for", "12b": "Form of the predictors in the model",
    "12c": "Model: kind, reason, steps of building it, choice of settings, internal validation",
    "12d": "Differences between centres or groups in estimates and performance",
    "12e": "Measures of performance, and their intervals", "12f": "Changes of the model after evaluation",
    "12g": "How predictions of the evaluation were computed",
    "13": "Rare classes: what was done, and to calibration after it",
    "14": "Fairness: what was done, and why", "15": "Output: probabilities or classes, and thresholds",
    "16": "Differences between the data of development and evaluation",
    "17": "Approval of an ethics committee, consent",
    "18a": "Funding", "18b": "Conflicts of interest", "18c": "Protocol", "18d": "Registration",
    "18e": "Access to data", "18f": "Access to code", "19": "Part of patients and the public",
    "20a": "Flow of participants, with and without the outcome", "20b": "Their characteristics, by split and centre",
    "20c": "Evaluation beside development: predictors and outcome",
    "21": "Participants and events in each analysis", "22": "The whole model, so that others can predict with it",
    "23a": "Performance with intervals, of important groups too", "23b": "Performance by centre",
    "24": "Results of updating", "25": "Interpretation, fairness included", "26": "Limitations",
    "27a": "Use: input that is poor or missing", "27b": "What users have to do and to know", "27c": "What comes next",
}  # fmt: skip
"""What each item asks for."""


def checklist_of(run: RunResults) -> list[tuple[str, str, str]]:
    """A row for each item: its number, what it asks for, and what the run knows; empty for the author to write."""
    known = _known(run)
    return [(item, asks, known.get(item, "")) for item, asks in ITEMS.items()]


def write_checklist(path: Path, rows: Sequence[tuple[str, str, str]]) -> None:
    """Write the items as a table, with a column for the page of the paper."""
    write_table(path, ["item", "what it asks for", "what the run knows", "page"], [[*row, ""] for row in rows])


def _known(run: RunResults) -> dict[str, str]:
    folder = first_of(run)
    with as_written(folder.config):
        config = flat(read_yaml(folder.config))
    covariates = covariates_in(folder)
    own = {part: records for part, records in folder.by_split.items() if records}
    counted = "; ".join(f"{part} {_count(records)}" for part, records in own.items())
    if run.folds is not None:
        counted = f"{len(run.folds['folds'])} folds; of the first: {counted}"
    sites = Counter(record.site for records in own.values() for record in records if record.site)
    packages = dict(read_json(folder.environment).get("packages", {}))
    skipped, first = run.scores.get("skipped", []), Interval.of(next(iter(run.scores["slide"].values())))

    def said(key: str) -> str:
        return str(config.get(key, "default"))

    found = {
        "5a": counted,
        "7": f"{len(skipped)} slides were left out as unreadable; see the config for how slides are read",
        "8a": ", ".join(run.scores.get("classes", [])),
        "9b": "pixels of the slide" + (f", and {covariates}" if covariates else ""),
        "10": f"{counted}; what was needed was not computed",
        "12a": f"{counted}; val chose the checkpoint; drawn by {said('data.split_by')}, seed {said('train.seed')}",
        "12b": "numbers standardised, categories one-hot, with an entry for missing cells" if covariates else "",
        "12c": f"backbone {said('model.backbone.class_path')}, head {said('model.head.class_path')}, "
        f"{said('train.epochs')} epochs, learning rate {said('model.learning_rate')}, trained part "
        f"{said('model.finetune')}, checkpoint by {said('train.monitor')}",
        "12e": f"{', '.join(run.scores['slide'])}, with 95 % intervals that count patients",
        "12f": "none", "12g": "by the fixed weights of the checkpoint",
        "13": f"data.balance {said('data.balance')}",
        "15": f"decided by {said('train.decision')}",
        "18f": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "20a": f"{counted}; {len(skipped)} slides unreadable",
        "21": f"{first.counts} patients evaluated" + ("" if first.events is None else ", with the outcome of all"),
        "22": "`wsi-train export` writes weights, config and thresholds",
        "23a": "; ".join(f"{name} {Interval.of(one)}" for name, one in run.scores["slide"].items()),
    }  # fmt: skip
    if sites:
        found["6a"] = f"{len(sites)} sites: " + ", ".join(f"{name} {count} slides" for name, count in sites.items())
    if "per_site" in run.scores:
        found["12d"] = found["23b"] = "by site, in the report"
    if covariates:
        rows = [f"{row[0]} {', '.join(map(' '.join, zip(own, row[1:])))}" for row in covariates.spread(own)]
        found["11"] = "; ".join(row for row in rows if ": missing" in row)
        found["20b"] = "; ".join(row for row in rows if ": missing" not in row)
        found["27a"] = "missing covariates have an entry of their own; slides that cannot be read are named"
    if folder.cohort is not None:
        found["16"] = f"the cohort {folder.cohort}: `wsi-train deploy` says in what it is unlike"
    return {item: text for item, text in found.items() if text}


def _count(records: Sequence[SlideRecord]) -> str:
    return f"{len(records)} slides of {len({record.patient for record in records})} patients"
