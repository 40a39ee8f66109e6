"""Predictions of labels that do not exclude each other, and their scores: the mean over the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.rows import ClassRows
from wsi_trainer.metrics.scores import SCORES, Score
from wsi_trainer.metrics.table import Columns, PredictionsError, check_rows, read_rows, rows_of_patients, write_rows

_LABEL, _PREFIX = "label_", "probability_"


@dataclass(frozen=True)
class MultiLabelPredictions(ClassRows):
    """Whether each label applies, and its predicted probability."""

    labels: NDArray[np.float64]
    """(rows, classes): 1 where it applies, 0 where not, NaN where that is not known."""

    def __post_init__(self) -> None:
        shape = (len(self.slides), len(self.classes))
        check_rows(shape[0], self.patients, self.sites)
        if self.labels.shape != shape or self.probabilities.shape != shape:
            raise PredictionsError(
                f"labels {self.labels.shape} and probabilities {self.probabilities.shape} are not {shape}"
            )

    def of(self, name: str) -> Predictions:
        """One label against its absence, as predictions of two classes: the slides where it is known."""
        place = self.classes.index(name)
        known = np.flatnonzero(~np.isnan(self.labels[:, place]))
        one = self.take(known)
        p = one.probabilities[:, place]
        labels = one.labels[:, place].astype(np.int64)
        return Predictions(one.slides, one.patients, (f"not {name}", name), labels, np.stack([1 - p, p], 1), one.sites)

    def by_patient(self) -> MultiLabelPredictions:
        """One row for each patient: a label applies where it does on any slide, with its highest probability."""
        rows = rows_of_patients(self.patients).values()
        first = self.take(np.array([index[0] for index in rows]))
        labels = np.stack([np.fmax.reduce(self.labels[index]) for index in rows])
        probabilities = np.stack([self.probabilities[index].max(axis=0) for index in rows])
        return replace(first, slides=first.patients, labels=labels, probabilities=probabilities)

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, label_<class> ..., probability_<class> ..."""
        write_rows(path, self, *self.columns())

    def columns(self) -> Columns:
        """The columns of the file that are of this kind."""
        names = [prefix + name for prefix in (_LABEL, _PREFIX) for name in self.classes]
        return names, np.concatenate([self.labels, self.probabilities], axis=1).tolist()

    @staticmethod
    def read(path: Path) -> MultiLabelPredictions:
        """Read what `write` wrote."""
        table = read_rows(path)
        classes = tuple(name.removeprefix(_PREFIX) for name in table.columns if name.startswith(_PREFIX))
        labels = table.numbers([_LABEL + name for name in classes])
        probabilities = table.numbers([_PREFIX + name for name in classes])
        return MultiLabelPredictions(
            table.texts("slide"), table.texts("patient"), classes, labels, probabilities, table.sites
        )


def macro(predictions: MultiLabelPredictions, score: Score) -> float:
    """The mean of a score of two classes over the labels; NaN where one of them does not define it."""
    return float(np.mean([score(predictions.of(name)) for name in predictions.classes]))


MULTI_LABEL_SCORES: Mapping[str, Score] = {name: partial(macro, score=score) for name, score in SCORES.items()}
