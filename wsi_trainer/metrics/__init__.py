"""Scores of slide classifiers, with confidence intervals by bootstrap over patients.

What was predicted is one of six frozen dataclasses, each with `slides`, `patients`, `sites`, `take(rows)`,
`by_patient()`, `write(path)` and `read(path)`:

- `Predictions`: exclusive classes (`classes`, `labels`, `probabilities`); ordered classes too.
- `MultiLabelPredictions`: labels that do not exclude each other; `of(name)` gives one as `Predictions`.
- `ValuePredictions`: a number (`targets`, `values`).
- `RiskPredictions`: survival (`times`, `events`, `risks`).
- `AreaPredictions`: a class for each pixel (`pixels`).
- `JointPredictions`: a class for each pixel (`areas`) and one of the others (`labels`).

Two more judge the regions that `wsi-train segment` finds, `BorderPredictions` (`pixels` of borders) and
`LesionPredictions` (`marks`: lesions and false positives).

A score is a function from predictions to a float; `SCORES`, `ORDINAL_SCORES`, `MULTI_LABEL_SCORES`, `VALUE_SCORES`,
`RISK_SCORES`, `AREA_SCORES`, `BORDER_SCORES` and `FROC_SCORES` list those of a kind by name. `summarise` computes all
of them as JSON, `score_intervals` those asked for, `paired_difference` compares two models, `cross_validation` joins
folds.
"""

from wsi_trainer.metrics.areas import AREA_SCORES, AreaPredictions
from wsi_trainer.metrics.bootstrap import Interval, paired_difference, score_intervals
from wsi_trainer.metrics.borders import BORDER_SCORES, BorderPredictions
from wsi_trainer.metrics.curves import Calibration, PrBand, RocBand, calibration, pr_band, roc_band
from wsi_trainer.metrics.folds import cross_validation, join
from wsi_trainer.metrics.froc import FROC_SCORES, FrocBand, froc_band
from wsi_trainer.metrics.joint import JointPredictions, joint_scores
from wsi_trainer.metrics.kinds import AnyPredictions, read_predictions
from wsi_trainer.metrics.lesions import MISSED, LesionPredictions, Marks
from wsi_trainer.metrics.multilabel import MULTI_LABEL_SCORES, MultiLabelPredictions
from wsi_trainer.metrics.predictions import Predictions
from wsi_trainer.metrics.regression import VALUE_SCORES, ValuePredictions
from wsi_trainer.metrics.scores import LOWER_IS_BETTER, ORDINAL_SCORES, SCORES, Score, auc, confusion, quadratic_kappa
from wsi_trainer.metrics.summary import summarise
from wsi_trainer.metrics.survival import RISK_SCORES, RiskPredictions, c_index, kaplan_meier
from wsi_trainer.metrics.table import PredictionsError

__all__ = [
    "AREA_SCORES",
    "BORDER_SCORES",
    "FROC_SCORES",
    "LOWER_IS_BETTER",
    "MISSED",
    "MULTI_LABEL_SCORES",
    "ORDINAL_SCORES",
    "RISK_SCORES",
    "SCORES",
    "VALUE_SCORES",
    "AnyPredictions",
    "AreaPredictions",
    "BorderPredictions",
    "Calibration",
    "FrocBand",
    "Interval",
    "JointPredictions",
    "LesionPredictions",
    "Marks",
    "MultiLabelPredictions",
    "PrBand",
    "Predictions",
    "PredictionsError",
    "RiskPredictions",
    "RocBand",
    "Score",
    "ValuePredictions",
    "auc",
    "c_index",
    "calibration",
    "confusion",
    "cross_validation",
    "froc_band",
    "join",
    "joint_scores",
    "kaplan_meier",
    "paired_difference",
    "pr_band",
    "quadratic_kappa",
    "read_predictions",
    "roc_band",
    "score_intervals",
    "summarise",
]
