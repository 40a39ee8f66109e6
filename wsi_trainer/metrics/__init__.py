"""Scores of slide classifiers, with confidence intervals by bootstrap over patients."""

from wsi_trainer.metrics.bootstrap import Interval, paired_difference, score_intervals
from wsi_trainer.metrics.curves import RocBand, roc_band
from wsi_trainer.metrics.predictions import Predictions, PredictionsError
from wsi_trainer.metrics.scores import SCORES, auc

__all__ = [
    "SCORES",
    "Interval",
    "Predictions",
    "PredictionsError",
    "RocBand",
    "auc",
    "paired_difference",
    "roc_band",
    "score_intervals",
]
