"""Predictions of a number, and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.table import (
    Columns,
    PredictionsError,
    check_rows,
    owners_of_rows,
    read_rows,
    rows_of_patients,
    write_rows,
)


@dataclass(frozen=True)
class ValuePredictions:
    """A number and what was predicted for it, one row for each slide (or each patient)."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    targets: NDArray[np.float64]
    """(rows,) what the manifest says."""
    values: NDArray[np.float64]
    """(rows,) what the model says."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rows(len(self.slides), self.patients, self.sites)
        if self.targets.shape != (len(self),) or self.values.shape != (len(self),):
            raise PredictionsError(f"{len(self)} slides, {self.targets.shape} targets, {self.values.shape} values")

    def __len__(self) -> int:
        return len(self.slides)

    @property
    def truth(self) -> NDArray[np.float64]:
        """What is true of each row: the numbers."""
        return self.targets

    def take(self, rows: NDArray[np.int64]) -> ValuePredictions:
        """The rows with these indices, in this order, repeats included."""
        return replace(self, **owners_of_rows(self, rows), targets=self.targets[rows], values=self.values[rows])

    def by_patient(self) -> ValuePredictions:
        """One row for each patient: the means over the slides."""
        rows = rows_of_patients(self.patients).values()
        first = self.take(np.array([index[0] for index in rows]))
        targets, values = (np.array([x[index].mean() for index in rows]) for x in (self.targets, self.values))
        return replace(first, slides=first.patients, targets=targets, values=values)

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, target, value."""
        write_rows(path, self, *self.columns())

    def columns(self) -> Columns:
        """The columns of the file that are of this kind."""
        return ["target", "value"], np.stack([self.targets, self.values], axis=1).tolist()

    @staticmethod
    def read(path: Path) -> ValuePredictions:
        """Read what `write` wrote."""
        table = read_rows(path)
        targets, values = table.numbers(["target", "value"]).T
        return ValuePredictions(table.texts("slide"), table.texts("patient"), targets, values, table.sites)


def mean_absolute_error(predictions: ValuePredictions) -> float:
    """The mean distance of the value from the target."""
    return float(np.abs(predictions.values - predictions.targets).mean())


def root_mean_squared_error(predictions: ValuePredictions) -> float:
    """The root of the mean squared distance."""
    return float(np.sqrt(((predictions.values - predictions.targets) ** 2).mean()))


def r2(predictions: ValuePredictions) -> float:
    """The share of the targets' variance that the values explain; negative where their mean would explain more."""
    spread = ((predictions.targets - predictions.targets.mean()) ** 2).sum()
    if not spread:
        return float("nan")
    return float(1 - ((predictions.values - predictions.targets) ** 2).sum() / spread)


def pearson(predictions: ValuePredictions) -> float:
    """Correlation of values and targets."""
    return _correlation(predictions.values, predictions.targets)


def spearman(predictions: ValuePredictions) -> float:
    """Correlation of their ranks."""
    return _correlation(rankdata(predictions.values), rankdata(predictions.targets))


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    first, second = first - first.mean(), second - second.mean()
    norm = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / norm) if norm else float("nan")


VALUE_SCORES: Mapping[str, Score] = {
    "r2": r2,
    "pearson": pearson,
    "spearman": spearman,
    "mean_absolute_error": mean_absolute_error,
    "root_mean_squared_error": root_mean_squared_error,
}
