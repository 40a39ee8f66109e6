"""Predictions as tables of slides, their scores, and 95 % intervals that count patients.

A kind of predictions is a frozen dataclass, one file of CSV, and knows its scores, words, errors and figures:
`ClassPredictions` (exclusive classes, ordered ones too), `MultiLabelPredictions`, `ValuePredictions` (a number),
`RiskPredictions` (survival), `AreaPredictions` (a class for each pixel), `JointPredictions` (pixels, and a target of
the slide). Two more judge the regions that `wsi-train segment` finds: `BorderPredictions` and `LesionPredictions`.

`read_predictions` reads a file of any kind, `summarise` computes all scores as JSON, `score_intervals` those asked for,
`paired_difference` compares two models, `cross_validation` joins folds. A new kind is a file here and a row of `KINDS`.
"""

from pathlib import Path

from wsi_trainer.metrics.classes import (
    MULTI_LABEL_SCORES,
    ORDINAL_SCORES,
    SCORES,
    ClassPredictions,
    MultiLabelPredictions,
    auc,
)
from wsi_trainer.metrics.intervals import (
    Interval,
    cross_validation,
    joined_folds,
    paired_difference,
    score_intervals,
    summarise,
)
from wsi_trainer.metrics.lesions import FROC_SCORES, MISSED, LesionPredictions, Marks
from wsi_trainer.metrics.pixels import (
    AREA_SCORES,
    BORDER_SCORES,
    AreaPredictions,
    BorderPredictions,
    JointPredictions,
    joint_scores,
)
from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Table, Words
from wsi_trainer.metrics.values import (
    RISK_SCORES,
    VALUE_SCORES,
    RiskPredictions,
    ValuePredictions,
)

KINDS: tuple[type[Predictions], ...] = (RiskPredictions, ValuePredictions, ClassPredictions, MultiLabelPredictions)
"""Kinds of predictions of slides; a file may hold `AreaPredictions` beside one of them."""

LOWER_IS_BETTER = frozenset({"loss", "brier", "calibration_error", "mean_absolute_error", "root_mean_squared_error"})
"""Of all other scores the higher value is the better one."""


def read_predictions(path: Path) -> Predictions:
    """The predictions of a file that any task wrote, told apart by its columns."""
    table = Table.read(path)
    labels = next((kind for kind in KINDS if kind.claims(table.columns)), None)
    areas = AreaPredictions.claims(table.columns)
    if labels is None and not areas:
        raise PredictionsError(f"{path} has none of the columns label, label_<class>, value, risk and drawn_<class>")
    try:
        if labels is None:
            return AreaPredictions.of_table(table)
        said = labels.of_table(table)
        return JointPredictions.of(AreaPredictions.of_table(table), said) if areas else said
    except PredictionsError as error:  # of values that do not go together, which are checked without the file's name
        raise error if str(path) in str(error) else PredictionsError(f"{path}: {error}") from error


__all__ = [
    "AREA_SCORES",
    "BORDER_SCORES",
    "FROC_SCORES",
    "KINDS",
    "LOWER_IS_BETTER",
    "MISSED",
    "MULTI_LABEL_SCORES",
    "ORDINAL_SCORES",
    "RISK_SCORES",
    "SCORES",
    "VALUE_SCORES",
    "AreaPredictions",
    "BorderPredictions",
    "ClassPredictions",
    "Interval",
    "JointPredictions",
    "LesionPredictions",
    "Marks",
    "MultiLabelPredictions",
    "Predictions",
    "PredictionsError",
    "RiskPredictions",
    "Score",
    "ValuePredictions",
    "Words",
    "auc",
    "cross_validation",
    "joined_folds",
    "joint_scores",
    "paired_difference",
    "read_predictions",
    "score_intervals",
    "summarise",
]
