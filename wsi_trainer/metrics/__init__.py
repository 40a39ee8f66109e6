"""Predictions as tables of slides, their scores, and 95 % intervals that count patients.

A kind of predictions is a frozen dataclass, one file of CSV, and knows its scores, words, errors and figures:
`ClassPredictions` (exclusive classes, ordered ones too), `MultiLabelPredictions`, `ValuePredictions` (a number),
`RiskPredictions` (survival), `AreaPredictions` (a class for each pixel). `MultiTargetPredictions` has one of these for
each target that a network predicts; `by_target` of all of them is the predictions of each target by its name. Two more
judge the regions that `wsi-train segment` finds: `BorderPredictions` and `LesionPredictions`. A `Decision` says from
which probability on a class is decided for.

`read_predictions` reads a file of any kind and `write_predictions` writes it, `summarise` computes all scores as JSON,
`score_intervals` those asked for, `at_the_point` what is decided with, `paired_difference` compares two models on the
same slides and `unpaired_difference` on others, `cross_validation` joins folds. A new kind
is a class here and a row of `KINDS`.
"""

from wsi_trainer.metrics.classes import (
    MULTI_LABEL_SCORES,
    ORDINAL_SCORES,
    SCORES,
    ClassPredictions,
    MultiLabelPredictions,
    auc,
)
from wsi_trainer.metrics.decision import Decision
from wsi_trainer.metrics.intervals import (
    Interval,
    comparison,
    cross_validation,
    joined_folds,
    paired_difference,
    score_intervals,
    summarise,
    unpaired_difference,
)
from wsi_trainer.metrics.lesions import FROC_SCORES, MISSED, LesionPredictions, Marks
from wsi_trainer.metrics.operating import at_the_point, delong_difference
from wsi_trainer.metrics.pixels import (
    AREA_SCORES,
    BORDER_SCORES,
    AreaPredictions,
    BorderPredictions,
)
from wsi_trainer.metrics.survival import Baseline, survivals
from wsi_trainer.metrics.table import Predictions, PredictionsError, Score, Words
from wsi_trainer.metrics.targets import (
    KINDS,
    MultiTargetPredictions,
    kinds_of,
    prefixes,
    read_predictions,
    scores_by_target,
    write_predictions,
)
from wsi_trainer.metrics.values import (
    RISK_SCORES,
    VALUE_SCORES,
    RiskPredictions,
    ValuePredictions,
)

LOWER_IS_BETTER = frozenset({"loss", "brier", "calibration_error", "mean_absolute_error", "root_mean_squared_error"})
"""Of all other scores the higher value is the better one."""


def is_lower_better(score: str) -> bool:
    """True for a loss or an error, also of a target that is not the first, whose name stands before."""
    return any(score == name or score.endswith(f"_{name}") for name in LOWER_IS_BETTER)


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
    "Baseline",
    "BorderPredictions",
    "ClassPredictions",
    "Decision",
    "Interval",
    "LesionPredictions",
    "Marks",
    "MultiLabelPredictions",
    "MultiTargetPredictions",
    "Predictions",
    "PredictionsError",
    "RiskPredictions",
    "Score",
    "ValuePredictions",
    "Words",
    "at_the_point",
    "auc",
    "comparison",
    "cross_validation",
    "delong_difference",
    "is_lower_better",
    "joined_folds",
    "kinds_of",
    "paired_difference",
    "prefixes",
    "read_predictions",
    "score_intervals",
    "scores_by_target",
    "summarise",
    "survivals",
    "unpaired_difference",
    "write_predictions",
]
