"""What a report shows, gathered from the folder of a run and that of its baseline."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_trainer.data import read_manifest
from wsi_trainer.fit.run_folder import RunFolder, read_json
from wsi_trainer.metrics import Interval, Predictions, auc, paired_difference

Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Run:
    """One run as the report needs it."""

    name: str
    folder: RunFolder
    predictions: Predictions
    scores: dict[str, Any]
    curves: Curves
    memory: dict[str, Any]

    @staticmethod
    def load(name: str, folder: RunFolder, split: str) -> Run:
        """Read a run that was tested on the split."""
        return Run(
            name,
            folder.existing(),
            Predictions.read(folder.predictions(split)),
            read_json(folder.evaluation(split)),
            read_curves(folder.metrics),
            read_json(folder.memory),
        )


@dataclass(frozen=True)
class SlideRow:
    """One line of the table of slides."""

    slide: str
    path: Path
    patient: str
    label: str
    predicted: str
    error: float
    """One minus the probability of the true class: the worst mistakes have the highest."""
    probability: float
    """Of the predicted class."""
    baseline: float | None
    """The error of the baseline on this slide."""
    map: Path | None
    """The picture of what the model looked at."""

    @property
    def wrong(self) -> bool:
        return self.label != self.predicted


def read_curves(folder: Path) -> Curves:
    """The columns of the metrics by epoch; where a run was resumed, the later start counts."""
    columns: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("version_*/metrics.csv"), key=lambda p: int(p.parent.name.removeprefix("version_"))):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and row["epoch"]:
                        columns.setdefault(name, {})[int(row["epoch"])] = float(value)
    return {name: [values[epoch] for epoch in sorted(values)] for name, values in columns.items()}


def slide_rows(run: Run, baseline: Run | None) -> list[SlideRow]:
    """The slides, worst mistakes first."""
    paths = {record.slide: record.path for record in read_manifest(run.folder.splits)}
    errors = _errors(run.predictions)
    other = _errors(baseline.predictions) if baseline else {}
    entries = read_json(run.folder.heatmaps / "heatmaps.json").get("slides", {})
    maps = {slide: run.folder.heatmaps / entry["picture"] for slide, entry in entries.items()}
    rows = []
    for index, slide in enumerate(run.predictions.slides):
        probabilities = run.predictions.probabilities[index]
        predicted = int(probabilities.argmax())
        rows.append(
            SlideRow(
                slide=slide,
                path=paths[slide],
                patient=run.predictions.patients[index],
                label=run.predictions.classes[run.predictions.labels[index]],
                predicted=run.predictions.classes[predicted],
                error=errors[slide],
                probability=float(probabilities[predicted]),
                baseline=other.get(slide),
                map=maps.get(slide),
            )
        )
    return sorted(rows, key=lambda row: -row.error)


def difference(run: Run, baseline: Run) -> Interval:
    """AUC of the run minus that of the baseline, paired by slide."""
    return paired_difference(run.predictions, baseline.predictions, auc)


def _errors(predictions: Predictions) -> dict[str, float]:
    right = predictions.probabilities[range(len(predictions)), predictions.labels]
    return {slide: 1 - float(value) for slide, value in zip(predictions.slides, right, strict=True)}
