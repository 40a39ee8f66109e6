"""What a model said of each slide, as arrays and as a CSV file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.rows import ClassRows
from wsi_trainer.metrics.table import Columns, PredictionsError, check_rows, read_rows, rows_of_patients, write_rows

_PREFIX = "probability_"


@dataclass(frozen=True)
class Predictions(ClassRows):
    """Labels and predicted probabilities, which sum to one, of classes that exclude each other."""

    labels: NDArray[np.int64]
    """Index into `classes` of each row."""

    def __post_init__(self) -> None:
        rows = len(self.slides)
        check_rows(rows, self.patients, self.sites)
        if self.labels.shape != (rows,):
            raise PredictionsError(f"{rows} slides have labels of shape {self.labels.shape}")
        if self.probabilities.shape != (rows, len(self.classes)):
            shape = self.probabilities.shape
            raise PredictionsError(f"probabilities have shape {shape}, not ({rows}, {len(self.classes)})")
        if not np.isfinite(self.probabilities).all():
            bad = self.slides[int(np.flatnonzero(~np.isfinite(self.probabilities).all(axis=1))[0])]
            raise PredictionsError(f"the prediction of slide {bad} is not a finite number")

    def by_patient(self) -> Predictions:
        """One row for each patient.

        With two classes a patient is positive when any slide is, and has the highest probability of its
        slides. With more, the probabilities are averaged and the slides of a patient have to agree on the
        label.
        """
        rows = rows_of_patients(self.patients)
        labels, probabilities = zip(*(self._patient(patient, index) for patient, index in rows.items()), strict=True)
        first = self.take(np.array([index[0] for index in rows.values()]))
        label = np.array(labels, dtype=np.int64)
        return replace(first, slides=first.patients, labels=label, probabilities=np.stack(probabilities))

    def _patient(self, patient: str, rows: NDArray[np.int64]) -> tuple[int, NDArray[np.float64]]:
        labels, probabilities = self.labels[rows], self.probabilities[rows]
        if len(self.classes) == 2:
            return int(labels.max()), probabilities[probabilities[:, 1].argmax()]
        if len(set(labels.tolist())) > 1:
            raise PredictionsError(f"the slides of patient {patient} have different labels; use slide-level metrics")
        return int(labels[0]), probabilities.mean(axis=0)

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, site (where known), label, probability_<class> ..."""
        write_rows(path, self, *self.columns())

    def columns(self) -> Columns:
        """The columns of the file that are of this kind."""
        names = [_PREFIX + name for name in self.classes]
        labels = [self.classes[label] for label in self.labels]
        return ["label", *names], [[label, *row] for label, row in zip(labels, self.probabilities)]

    @staticmethod
    def read(path: Path) -> Predictions:
        """Read what `write` wrote."""
        table = read_rows(path)
        classes = tuple(name.removeprefix(_PREFIX) for name in table.columns if name.startswith(_PREFIX))
        absent = {"slide", "patient", "label"} - set(table.columns)
        if absent or not classes:
            raise PredictionsError(f"{path} lacks the columns {sorted(absent) or [_PREFIX + '<class>']}")
        unknown = next((row["label"] for row in table.rows if row["label"] not in classes), None)
        if unknown is not None:
            raise PredictionsError(f"{path} has the label {unknown!r}, which is none of its classes {list(classes)}")
        return Predictions(
            table.texts("slide"),
            table.texts("patient"),
            classes,
            np.array([classes.index(row["label"]) for row in table.rows], dtype=np.int64),
            table.numbers([_PREFIX + name for name in classes]),
            table.sites,
        )
