"""A class for each pixel and a target of the slide, predicted by one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.areas import AreaPredictions
from wsi_trainer.metrics.multilabel import MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.regression import ValuePredictions
from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.survival import RiskPredictions
from wsi_trainer.metrics.table import PredictionsError, write_rows

LabelPredictions = Predictions | MultiLabelPredictions | ValuePredictions | RiskPredictions
PREFIX = "label_"
"""Before the scores of what is predicted of the slide."""


@dataclass(frozen=True)
class JointPredictions:
    """Both predictions of the same slides, row by row."""

    areas: AreaPredictions
    labels: LabelPredictions

    def __post_init__(self) -> None:
        if self.areas.slides != self.labels.slides:
            raise PredictionsError("the areas and the labels are of different slides, or in another order")

    def __len__(self) -> int:
        return len(self.areas)

    @property
    def slides(self) -> tuple[str, ...]:
        return self.areas.slides

    @property
    def patients(self) -> tuple[str, ...]:
        return self.areas.patients

    @property
    def sites(self) -> tuple[str, ...]:
        return self.areas.sites

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of pixels."""
        return self.areas.classes

    @property
    def truth(self) -> NDArray[np.float64]:
        """What is true of each row: the pixels that are drawn, then the target of the slide."""
        return np.column_stack([self.areas.truth, self.labels.truth.astype(np.float64)])

    def take(self, rows: NDArray[np.int64]) -> JointPredictions:
        """The rows with these indices, in this order, repeats included."""
        return JointPredictions(self.areas.take(rows), self.labels.take(rows))

    def by_patient(self) -> JointPredictions:
        """One row for each patient, of each kind as it joins the slides of a patient."""
        return JointPredictions(self.areas.by_patient(), self.labels.by_patient())

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, site (where known), then the columns of both kinds."""
        (names, values), (more, others) = self.areas.columns(), self.labels.columns()
        write_rows(path, self, [*names, *more], [[*row, *other] for row, other in zip(values, others, strict=True)])


def joint_scores(areas: Mapping[str, Score], labels: Mapping[str, Score]) -> dict[str, Score]:
    """The scores of both, those of the slide's target with a prefix."""
    scores: dict[str, Score] = {name: partial(_of_areas, score=score) for name, score in areas.items()}
    scores |= {PREFIX + name: partial(_of_labels, score=score) for name, score in labels.items()}
    return scores


def _of_areas(predictions: JointPredictions, score: Score) -> float:
    return score(predictions.areas)


def _of_labels(predictions: JointPredictions, score: Score) -> float:
    return score(predictions.labels)
